#!/usr/bin/env bash
# Makes .venv with Python 3.12, 3.13 or 3.14 and the pinned packages. Does nothing when it is already as it should be. It needs some
# python3, 3.8 or newer: where no other one is there, uv fetches a Python.
#   scripts/setup.sh [EXTRA ...]     extras of pyproject.toml, "dev" unless told otherwise
#   scripts/setup.sh --uv            only say where uv is, installed if the machine has none
set -euo pipefail
cd "$(dirname "$0")/.."

versions=(3.12 3.13 3.14)
venv=.venv
own_uv=build/uv # where uv is put where the machine has none
extras=("${@:-dev}")
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} # a company's own certificates are in the system's store
# uv takes a quarter of pip's time: 32 against 129 s for all extras, with nothing downloaded before.
find_uv() { command -v uv || { [ -x $own_uv/bin/uv ] && printf '%s\n' $own_uv/bin/uv; }; }

pins() { awk -v name="$1==" 'index($0, name) == 1 { found = 1 } found { print } found && !/\\$/ { exit }' hashes.txt; }

install_uv() { # with the pip of some Python, by hash
  pins uv >"$own_uv.txt"
  "$1" -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --target $own_uv -r "$own_uv.txt"
}

if [ "${1:-}" = --uv ]; then
  mkdir -p build
  find_uv || { install_uv $venv/bin/python && find_uv; }
  exit
fi

# What the environment depends on; the directory too, since a moved environment is a broken one.
key=$(printf '%s\n' "$PWD" | cat - pyproject.toml hashes.txt scripts/setup.sh | cksum)

is_supported() {
  local version
  version=$("$@" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return
  [[ " ${versions[*]} " == *" $version "* ]]
}

stamp() { printf '%s/lockstep-setup-%s\n' "$venv" "$1"; }
missing=()
for extra in "${extras[@]}"; do
  [ "$(cat "$(stamp "$extra")" 2>/dev/null)" = "$key" ] || missing+=("$extra")
done
if [ ${#missing[@]} -eq 0 ] && is_supported $venv/bin/python; then
  exit 0
fi

find_python() {
  local name
  for name in "${versions[@]/#/python}" python3 python; do
    if is_supported "$name" && "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  return 1
}

SECONDS=0
mkdir -p build
if ! is_supported $venv/bin/python; then
  if [ -e $venv ]; then
    echo "setup: $venv is not a working environment of Python ${versions[*]}, making it anew"
    rm -rf $venv
  fi
  if python=$(find_python); then
    echo "setup: making $venv with $(command -v "$python")"
    "$python" -m venv $venv
  else
    if ! uv=$(find_uv) && command -v python3 >/dev/null; then
      echo "setup: there is no Python ${versions[*]}; installing uv in $own_uv, which fetches one"
      # Where pip is missing, the one that this Python brings is put into an environment of its own.
      python3 -m pip --version >/dev/null 2>&1 || python3 -m venv $own_uv-pip || true
      if [ -x $own_uv-pip/bin/python ]; then install_uv $own_uv-pip/bin/python || true; else install_uv python3 || true; fi
    fi
    if uv=$(find_uv) && "$uv" venv --quiet --python "${versions[0]}" $venv; then
      echo "setup: made $venv with the Python ${versions[0]} that uv has"
    else
      cat >&2 <<MESSAGE
setup: Python ${versions[*]} is missing, and uv could not be installed or could not fetch one (see above).
  Looked for: ${versions[*]/#/python}, python3 and python of these versions with the venv module; uv; and python3 with pip.
  To get it, one of:
    Debian, Ubuntu:  sudo apt install python${versions[0]} python${versions[0]}-venv
    macOS:           brew install python@${versions[0]}
    anywhere:        install uv (https://docs.astral.sh/uv)
  Then run the same command again.
MESSAGE
      exit 1
    fi
  fi
fi
for extra in "${extras[@]}"; do rm -f "$(stamp "$extra")"; done
wanted=".[$(IFS=,; printf '%s' "${extras[*]}")]"

echo "setup: installing the packages pinned in constraints.txt (about a minute)"
# Only these have no wheel, so that their own code is run to install them; what builds them and this checkout is a file of
# hashes.txt too. Another one is refused by name.
sdists=(--no-binary promise --no-binary rouge-score --no-binary sqlitedict --no-binary word2number)
has_pip() { $venv/bin/python -m pip --version >/dev/null 2>&1; }
uv=$(find_uv) || { has_pip && install_uv $venv/bin/python && uv=$(find_uv); } || uv=
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
