#!/usr/bin/env bash
# Writes hashes.txt: the pins of constraints.txt with the SHA-256 of every file of each, for all platforms, as the index
# has them. Run it after a change of constraints.txt; a test finds a pin without a hash.
#   scripts/make_hashes.sh jax-0.12     writes hashes-jax-0.12.txt instead: the newest versions without Levanter and Tunix
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$(command -v uv || printf .venv/bin/uv)
options=(--generate-hashes --no-header --no-annotate --no-emit-index-url --quiet --python-version 3.12)
if [ "${1:-}" = jax-0.12 ]; then
  extras=()
  for extra in dev plan gcs browser eval readers docs; do extras+=(--extra "$extra"); done
  "$uv" pip compile pyproject.toml "${extras[@]}" "${options[@]}" --upgrade --output-file hashes-jax-0.12.txt >/dev/null
else
  "$uv" pip compile constraints.txt --no-deps "${options[@]}" --output-file hashes.txt >/dev/null
fi
