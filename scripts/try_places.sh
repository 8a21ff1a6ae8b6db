#!/usr/bin/env bash
# Runs the tests of the last commit in clones that lie and are set up as people have them, one place after another.
#   scripts/try_places.sh [PLACE ...]   all places, unless told otherwise; ARGS='-k name' narrows the tests
# Each place is a function below, at_NAME before the set-up or with_NAME after it; several joined by "+" make one run of all
# of them. What a run printed stays in build/places.
# shellcheck disable=SC2329  # they are called by their names
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
places=(space temporary settings proxy git no_git loader locale ports user)
[ $# -eq 0 ] || places=("$@")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

at_space() { folder="$work/a folder of mine/lockstep"; }
with_temporary() {
  TMPDIR="$work/$(printf 'x%.0s' {1..110})"
  mkdir -p "$TMPDIR"
  export TMPDIR
}
with_settings() { # what other programs' users export
  export COLUMNS=40 FORCE_COLOR=1 NO_COLOR=1 PYTEST_ADDOPTS=-x PYTHONWARNINGS=default TZ=Pacific/Kiritimati
  export XLA_FLAGS=--xla_force_host_platform_device_count=3 JAX_ENABLE_X64=1 JAX_PLATFORMS=cuda JAX_DEBUG_NANS=1
  export JAX_COMPILATION_CACHE_DIR=gs://nobody/cache JAX_NUM_CPU_DEVICES=2 LIBTPU_INIT_ARGS=--xla_nothing
  export WANDB_API_KEY=0000 WANDB_MODE=online WANDB_PROJECT=theirs HF_HOME=/nowhere HF_TOKEN=hf_0000 TRANSFORMERS_CACHE=/nowhere
  export SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=2 OMPI_COMM_WORLD_SIZE=4 TPU_WORKER_ID=3 TPU_WORKER_HOSTNAMES=a,b
  export LOCKSTEP_NUM_PROCESSES=4 LOCKSTEP_PROCESS_ID=1 REQUIRE_MULTIHOST=1 XDG_CACHE_HOME=/nowhere KUBECONFIG=/nowhere
}
with_proxy() { export http_proxy=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9 ALL_PROXY=socks5://127.0.0.1:9; }
with_git() { # not the command: settings of its user
  export HOME="$work/home"
  mkdir -p "$HOME/hooks"
  printf '#!/bin/sh\nexit 1\n' >"$HOME/hooks/pre-commit" && chmod +x "$HOME/hooks/pre-commit"
  printf '[commit]\n gpgsign = true\n[tag]\n gpgsign = true\n[core]\n hooksPath = %s\n autocrlf = true\n[init]\n defaultBranch = x\n' \
    "$HOME/hooks" >"$HOME/.gitconfig"
  export GIT_DIR=/nowhere GIT_WORK_TREE=/nowhere GIT_INDEX_FILE=/nowhere
}
with_no_git() { # every command on PATH but git
  mkdir -p "$work/programs"
  local directory program
  IFS=: read -ra directories <<<"$path"
  for directory in "${directories[@]}"; do
    for program in "$directory"/*; do
      case ${program##*/} in git | git-*) ;; *) ln -s "$program" "$work/programs/" 2>/dev/null ;; esac
    done
  done
  export PATH="$work/programs"
  chmod 755 "$work" # another user's way to it
  start+=(env "PATH=$PATH")
}
with_loader() { # a Python that starts only where its libraries are named, as in conda
  export LD_LIBRARY_PATH="$work/libraries"
  local real
  real=$(readlink -f .venv/bin/python)
  rm .venv/bin/python
  # shellcheck disable=SC2016  # for the script that is written
  printf '#!/bin/bash\n[ -n "$LD_LIBRARY_PATH" ] || exit 127\nexec -a "$0" %q "$@"\n' "$real" >.venv/bin/python
  chmod +x .venv/bin/python
}
with_locale() { export LC_ALL=C LANG=de_DE.ISO-8859-1 PYTHONUTF8=0 PYTHONCOERCECLOCALE=0; }
with_ports() { # those that TPUs and JAX are known to use
  python3 - <<'P' &
import socket, time
taken = [socket.create_server(("127.0.0.1", port)) for port in (8470, 8471, 8476, 8482, 11211)]
time.sleep(7200)
P
}
at_user() { # another one, without rights, whose files are for nobody else, and whose environment is empty
  id lockstep-tests >/dev/null 2>&1 || useradd --create-home lockstep-tests || exit
  folder=/home/lockstep-tests/lockstep path=/usr/local/bin:/usr/bin:/bin
  start=("$(command -v runuser)" -u lockstep-tests -- env -i HOME=/home/lockstep-tests "PATH=$path" bash -c 'umask 077; exec "$@"' -)
}

try() { # in a shell of its own
  local folder=$work/lockstep path=$PATH start=() name names
  trap 'jobs -p | xargs -r kill' EXIT
  IFS=+ read -ra names <<<"$1"
  git clone -q "$root" "$work/clone" || return
  for name in "${names[@]}"; do ! declare -F "at_$name" >/dev/null || "at_$name"; done
  mkdir -p "$(dirname "$folder")"
  rm -rf "$folder"
  mv "$work/clone" "$folder"
  [ ${#start[@]} -eq 0 ] || chown -R lockstep-tests "$folder"
  cd "$folder" || return
  "${start[@]}" make --no-print-directory setup-tests || return
  for name in "${names[@]}"; do ! declare -F "with_$name" >/dev/null || "with_$name"; done
  "${start[@]}" make --no-print-directory test ARGS="${ARGS:-}"
}

mkdir -p "$root/build/places"
failed=0
for place in "${places[@]}"; do
  log=$root/build/places/$place.log
  if (try "$place") >"$log" 2>&1; then
    echo "$place: $(tail -n 1 "$log")"
  else
    failed=1
    echo "$place: FAILED, see $log: $(grep -E '^(FAILED|ERROR|setup:|make)' "$log" | tail -n 1)"
  fi
  rm -rf "${work:?}"/*
done
exit $failed
