#!/usr/bin/env bash
# Makes .venv with Python 3.12 and the pinned packages. Does nothing when it is already as it should be.
#   scripts/setup.sh [EXTRA ...]     extras of pyproject.toml, "dev" unless told otherwise
set -euo pipefail
cd "$(dirname "$0")/.."

want=3.12
venv=.venv
extras=("${@:-dev}")
# What the environment depends on; the directory too, since a moved environment is a broken one.
key=$(printf '%s\n' "$PWD" | cat - pyproject.toml hashes.txt scripts/setup.sh | cksum)

is_wanted() { [ "$("$@" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$want" ]; }

stamp() { printf '%s/lockstep-setup-%s\n' "$venv" "$1"; }
missing=()
for extra in "${extras[@]}"; do
  [ "$(cat "$(stamp "$extra")" 2>/dev/null)" = "$key" ] || missing+=("$extra")
done
if [ ${#missing[@]} -eq 0 ] && is_wanted $venv/bin/python; then
  exit 0
fi

find_python() {
  local name
  for name in "python$want" python3 python; do
    if is_wanted "$name" && "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  return 1
}

SECONDS=0
if ! is_wanted $venv/bin/python; then
  if [ -e $venv ]; then
    echo "setup: $venv is not a working Python $want environment, making it anew"
    rm -rf $venv
  fi
  if python=$(find_python); then
    echo "setup: making $venv with $(command -v "$python")"
    "$python" -m venv $venv
  elif command -v uv >/dev/null 2>&1; then
    echo "setup: making $venv with uv (it fetches Python $want if it has to)"
    uv venv --quiet --python "$want" $venv
  else
    cat >&2 <<MESSAGE
setup: Python $want is missing.
  Looked for: python$want, python3 and python of version $want with the venv module; and for uv.
  To get it, one of:
    Debian, Ubuntu:  sudo apt install python$want python$want-venv
    macOS:           brew install python@$want
    anywhere:        install uv (https://docs.astral.sh/uv), which fetches Python $want by itself
  Then run the same command again.
MESSAGE
    exit 1
  fi
fi
for extra in "${extras[@]}"; do rm -f "$(stamp "$extra")"; done
wanted=".[$(IFS=,; printf '%s' "${extras[*]}")]"

echo "setup: installing the packages pinned in constraints.txt (about a minute)"
# Only these have no wheel, so that their own code is run to install them; what builds them and this checkout is a file of
# hashes.txt too. Another one is refused by name.
sdists=(--no-binary promise --no-binary rouge-score --no-binary sqlitedict --no-binary word2number)
pins() { awk -v name="$1==" 'index($0, name) == 1 { found = 1 } found { print } found && !/\\$/ { exit }' hashes.txt; }
has_pip() { $venv/bin/python -m pip --version >/dev/null 2>&1; }
# uv takes a quarter of pip's time: 32 against 129 s for all extras, with nothing downloaded before.
uv=$(command -v uv || true)
if [ -z "$uv" ] && has_pip; then
  if $venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps \
    -r <(pins uv); then
    uv=$venv/bin/uv
  fi
fi
if [ -n "$uv" ] && "$uv" pip install --quiet --python $venv/bin/python -c hashes.txt --build-constraint hashes.txt \
  --only-binary :all: "${sdists[@]}" -e "$wanted"; then
  :
elif has_pip; then
  # pip may have been told of an index or a certificate that uv does not know. It takes no hashes beside -e, so what it
  # would install is compared first, and installed by the hashes that it was found with; then this checkout, alone.
  echo "setup: installing with pip instead of uv"
  pip=("$venv/bin/python" -m pip install -qq --no-compile --disable-pip-version-check)
  "${pip[@]}" --require-hashes --no-deps --only-binary :all: -r <(pins setuptools)
  pip+=(--no-build-isolation --only-binary :all: "${sdists[@]}")  # isolated, pip fetches any setuptools
  if ! found=$("${pip[@]}" -c constraints.txt -e "$wanted" --dry-run --ignore-installed --report - |
    $venv/bin/python scripts/check_hashes.py); then
    echo "setup: nothing was installed: the files above are not those of hashes.txt, or pip says above what failed." >&2
    echo "  Where your index has builds of its own, write their hashes: scripts/make_hashes.sh, then run this again." >&2
    exit 1
  fi
  # Python compiles what is used when it is first used; compiling all of it now takes half as long as the rest.
  "${pip[@]}" --require-hashes --no-deps -r <(printf '%s\n' "$found")
  "${pip[@]}" --no-deps -e .
else
  echo "setup: $venv has no pip, and uv is missing or failed (see above). Remove $venv and run the same command again." >&2
  exit 1
fi
$venv/bin/python -c 'import jax, lockstep'
for extra in "${extras[@]}"; do printf '%s\n' "$key" >"$(stamp "$extra")"; done
echo "setup: done in $SECONDS s"
