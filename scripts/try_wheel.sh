#!/usr/bin/env bash
# Installs a wheel as its users do, alone in a new environment, and tries it there: help, doctor, demo.
#   scripts/try_wheel.sh PYTHON WHEEL [PIP OPTION ...]
set -euo pipefail

python=$1
wheel=$(realpath "$2")
shift 2
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT

"$python" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" "$wheel"
"$home/venv/bin/python" -m pip check
du -sm "$home/venv/lib" | awk '{ print $1 " MiB installed" }'

# Away from the checkout, so that the installed package is the only one.
cd "$home"
unset PYTHONPATH
export PATH="$home/venv/bin:$PATH"
lockstep --help >/dev/null
lockstep doctor
lockstep demo
