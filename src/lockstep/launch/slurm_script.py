"""The scripts of a Slurm job: output and exit code of every task in a file; the job's code is the first failure's."""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lockstep.errors import ConfigError
from lockstep.exits import EXIT_CODES, FAULT, PEER_FAILED, SETUP_FAILED, TERMINATED, WORKER_LOST
from lockstep.launch.environment import RESTARTS, run_command

SECRETS: Final = "secrets.sh"
"""The file in the job's directory, readable by its owner alone, that sets the secret variables."""
SCRIPT: Final = "job.sh"
TASK: Final = "task.sh"
CODE: Final = "code"
"""The file in an attempt's directory with the exit code of the whole attempt; those of the tasks are ``code-N``."""
WARNING_S: Final = 120  # seconds before the time limit at which the tasks get SIGTERM: time to save

TIME_LIMIT: Final = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE")
"""As sbatch has it (https://slurm.schedmd.com/sbatch.html#OPT_time)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job of Slurm, of which the batch script is made."""

    name: str
    directory: Path  # where its script, logs and codes are, on a file system that all nodes share
    command: Sequence[str]
    nodes: int
    tasks_per_node: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_secrets: bool = False  # whether there is a file `SECRETS`
    retries: int = 0  # how often it is started again after a failure that another try can cure
    time_limit: str | None = None  # as for `sbatch --time`; None: the partition's
    options: Sequence[str] = ()  # more options of sbatch, each as `--name=value`

    def __post_init__(self) -> None:
        if self.time_limit is not None and not TIME_LIMIT.fullmatch(self.time_limit):
            raise ConfigError(
                f"--time_limit is {self.time_limit!r}; it must be minutes, minutes:seconds, hours:minutes:seconds, "
                "days-hours, days-hours:minutes or days-hours:minutes:seconds, such as 2-00:00:00."
            )
        for option in self.options:
            if not option.startswith("-") or not option.isprintable():
                raise ConfigError(
                    f"--sbatch is {option!r}; it must be one option on one line, such as --sbatch=--constraint=tpu."
                )
        if re.search(r'["\\%]', str(self.directory)) or not str(self.directory).isprintable():
            raise ConfigError(
                f"the job's directory is {str(self.directory)!r}; Slurm reads '%', '\"' and '\\' in the name of a log "
                "otherwise than a file system. Name another one by LOCKSTEP_JOBS_DIR."
            )

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


def batch_script(job: SlurmJob) -> str:
    """The script for ``sbatch``, without secrets."""
    directory = shlex.quote(str(job.directory))
    retried = "|".join(str(row.code) for row in EXIT_CODES.values() if row.retried)
    consequence = f"$1 == {PEER_FAILED} || $1 == {TERMINATED}"
    public = "".join(f" {shlex.quote(f'{name}={value}')}" for name, value in job.environment.items())
    # The last attempt needs the file no longer once it is read: then it is gone whatever ends the job. An earlier one
    # leaves it to the next, which Slurm starts also where nothing of this script can run any more.
    secrets = f"""\
    # shellcheck source=/dev/null
    . "$1/{SECRETS}" || {{
        echo "the job's secrets are gone, so it cannot be started again; launch it anew"
        exit {SETUP_FAILED}
    }}
    if [ "$3" -gt {job.retries} ]; then
        command -p rm -f "$1/{SECRETS}"
    fi
"""
    return f"""\
#!/bin/bash
{_directives(job)}
set -u
directory={directory}
attempt=$((${{SLURM_RESTART_COUNT:-0}} + 1))
logs=$directory/attempt-$attempt
mkdir -p "$logs"
# What the job sets is set for its tasks alone, and no variable of it can replace one of this script's.
run() {{
{secrets if job.has_secrets else ""}\
    # The first task that fails ends the others; each notes its exit code and when.
    exec env {RESTARTS}=$(($3 - 1)){public} \\
        srun --kill-on-bad-exit=1 --output="$2/worker-%t.log" --error="$2/worker-%t.log" \\
        bash "$1/{TASK}" "$2" {shlex.join(job.command)}
}}
(run "$directory" "$logs" "$attempt")
status=$?
# The job's code is that of the first failure: of one that failed by itself before a fault, which may come of it, and
# of a fault before one that another has ended.
failed=$(cat "$logs"/code-* 2> /dev/null | awk '$1 != 0 {{ print ({consequence}) ? 2 : $1 == {FAULT}, $1, $2 }}')
read -r rank code _ <<< "$(sort -k 1,1n -k 3,3n <<< "$failed")"
noted=$(find "$logs" -name 'code-*' | wc -l)
if [ "${{rank:-2}}" -gt 0 ] && [ "$status" -ne 0 ] && [ "$noted" -lt {job.tasks} ]; then
    code={WORKER_LOST}
fi
code=${{code:-$status}}
echo "$code" > "$logs/{CODE}"
case $code in
    {retried})
        if [ "$attempt" -le {job.retries} ] && scontrol requeue "$SLURM_JOB_ID"; then
            sleep 60 # until Slurm ends this attempt
            exit "$code"
        fi
        ;;
esac
rm -f "$directory/{SECRETS}"
exit "$code"
"""


def task_script(secret_names: Sequence[str]) -> str:
    """The script of one task: it runs the command, and notes how it ended, and when."""
    return f"""\
#!/bin/bash
logs=$1
shift
{run_command(list(secret_names), '$(dirname "$logs")', forward=False)}\
trap '' TERM INT # what Slurm ends because of another task still notes when
printf '%s %s\\n' "$code" "$(date +%s.%N)" > "$logs/code-$SLURM_PROCID"
exit "$code"
"""


def secrets_file(variables: Mapping[str, str]) -> str:
    """The file that the script reads to set the secret variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _directives(job: SlurmJob) -> str:
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks_per_node}",
        f'--output="{job.directory}/slurm-%j.log"',
        "--open-mode=append",
        "--requeue" if job.retries else "--no-requeue",
    ]
    if job.time_limit is not None:
        options += [f"--time={job.time_limit}", f"--signal=TERM@{WARNING_S}"]
    return "\n".join(f"#SBATCH {option}" for option in [*options, *job.options])
