#!/usr/bin/env bash
# Runs tests in an environment of its own, with other versions than those of .venv, and says which.
#   scripts/test_versions.sh jax-0.12 [PYTEST ARGUMENT ...]   the versions of hashes-jax-0.12.txt
#   scripts/test_versions.sh newest [PYTEST ARGUMENT ...]     the newest of everything, pre-releases of jax too
#   scripts/test_versions.sh environments PYTEST ARGUMENT ... verifiers and OpenEnv, which do not live beside Levanter
# Levanter and Tunix pin jax 0.11, so their tests are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=${1:?jax-0.12, newest or environments}
shift
venv=build/venv-$versions
uv=$(scripts/setup.sh --uv)
extras=dev,plan,gcs,browser,eval,readers,docs
pins=hashes-jax-0.12.txt

case $versions in
  jax-0.12) options=(-c "$pins" --build-constraint hashes.txt) ;;
  newest)
    mkdir -p build
    # Our own upper bound of jax is what is tried here. An override takes the extra with it, which has libtpu.
    printf 'jax[tpu]>=0.12.0rc0\njaxlib>=0.12.0rc0\n' >build/newest-overrides.txt
    options=(--upgrade --override build/newest-overrides.txt)
    ;;
  environments)
    extras=dev,verifiers
    pins=hashes.txt
    options=(-c hashes.txt --build-constraint hashes.txt)
    ;;
  *) echo "test_versions: $versions is none of jax-0.12, newest and environments" >&2 && exit 2 ;;
esac
[ -x "$venv/bin/python" ] || "$uv" venv --quiet --seed --python .venv/bin/python "$venv"
"$uv" pip install --quiet --python "$venv/bin/python" "${options[@]}" -e ".[$extras]"
if [ "$versions" = environments ]; then
  # Without gradio, which only its web pages need, and which asks for an older pandas.
  "$uv" pip install --quiet --python "$venv/bin/python" -c hashes.txt fastapi fastmcp uvicorn websockets
  awk '/^openenv-core==/ { found = 1 } found { print } found && !/\\$/ { exit }' hashes.txt >build/openenv.txt
  "$uv" pip install --quiet --python "$venv/bin/python" --require-hashes --no-deps -r build/openenv.txt
fi
echo "test_versions: $versions, other than in $pins:"
installed=$("$uv" pip freeze --quiet --python "$venv/bin/python" | grep -E '^[^ ]+==' | grep -v '^pip==')
grep -vxFf <(grep -oE '^[^ ]+==[^ ]+' "$pins") <<<"$installed" || echo "  nothing"
exec "$venv/bin/python" -m pytest --ignore-glob='*levanter*' --ignore-glob='*tunix*' --ignore-glob='*snowball*' \
  -k "not levanter and not tunix and not snowball" "$@"
