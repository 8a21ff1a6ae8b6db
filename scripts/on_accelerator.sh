#!/usr/bin/env bash
# Tries Lockstep on the accelerator of this machine, a GPU or the TPU of a VM, in at most 6 minutes and without a network: decode and
# prefill of 1B and 8B shapes beside what `lockstep plan` gives at best, a step of GRPO, doctor's self-test, the engine's tests.
#   scripts/on_accelerator.sh [--quick] [--wheels DIR]
# Results, good and bad, go to benchmarks/results (or $RESULTS) under the name of the device. $PYTHON has jax for the accelerator; else
# .venv, else python3. What it lacks is installed from the wheels in DIR, which were downloaded before, where there was a network:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d DIR NAME==VERSION ...
set -euo pipefail
cd "$(dirname "$0")/.."

quick=() wheels=
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=(--quick) ;;
    --wheels) wheels=${2:?--wheels needs a directory}; shift ;;
    *) echo "on_accelerator: $1 is no option. Usage: scripts/on_accelerator.sh [--quick] [--wheels DIR]" >&2; exit 2 ;;
  esac
  shift
done
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)

export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$wheels" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  PYTHONPATH=$PYTHONPATH:$site
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline
if [ ${#quick[@]} -gt 0 ]; then export JAX_PLATFORMS=cpu; else unset JAX_PLATFORMS; fi
"$python" -m benchmarks.accelerator "${quick[@]}" --json "${RESULTS:-benchmarks/results}"
