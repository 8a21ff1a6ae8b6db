#!/usr/bin/env bash
# Writes hashes.txt: the pins of constraints.txt with the SHA-256 of every file of each, for all platforms, as the index
# has them. Run it after a change of constraints.txt; a test finds a pin without a hash.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$(command -v uv || printf .venv/bin/uv)
"$uv" pip compile constraints.txt --no-deps --generate-hashes --no-header --no-annotate --no-emit-index-url \
  --quiet --python-version 3.12 --output-file hashes.txt >/dev/null
