"""The scripts of a Slurm job: output and exit code of every task in a file; the job's code is the first failure's."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lockstep.exit_codes import EXIT_CODES, PEER_FAILED, TERMINATED, WORKER_LOST
from lockstep.launch.task_script import run_command

SECRETS: Final = "secrets.sh"
"""The file in the job's directory, readable by its owner alone, that sets the secret variables."""
SCRIPT: Final = "job.sh"
TASK: Final = "task.sh"
CODE: Final = "code"
"""The file in an attempt's directory with the exit code of the whole attempt; those of the tasks are ``code-N``."""
WARNING_S: Final = 120
"""Seconds before the time limit at which the tasks get SIGTERM: time to save."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a batch script is made of.

    Args:
        name: The job's name.
        directory: Where its script, logs and codes are, on a file system that all nodes share.
        command: What every task runs.
        nodes: The number of nodes.
        tasks_per_node: The number of processes of the job on each node.
        environment: Public variables of every task.
        retries: How often it is started again after a failure that another try can cure.
        time_limit: As for ``sbatch --time``; None: the partition's.
        options: More options of sbatch, each as ``--name=value``.
    """

    name: str
    directory: Path
    command: Sequence[str]
    nodes: int
    tasks_per_node: int = 1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    retries: int = 0
    time_limit: str | None = None
    options: Sequence[str] = ()

    @property
    def tasks(self) -> int:
        """The number of processes of the job."""
        return self.nodes * self.tasks_per_node


def batch_script(job: SlurmJob) -> str:
    """The script for ``sbatch``.

    Args:
        job: The job.

    Returns:
        The text of a Bash script without secrets.
    """
    directory = shlex.quote(str(job.directory))
    retried = "|".join(str(row.code) for row in EXIT_CODES.values() if row.retried)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items())
    return f"""\
#!/bin/bash
{_directives(job)}
set -u
directory={directory}
attempt=$((${{SLURM_RESTART_COUNT:-0}} + 1))
logs=$directory/attempt-$attempt
mkdir -p "$logs"
{exports}if [ -f "$directory/{SECRETS}" ]; then
    # shellcheck source=/dev/null
    . "$directory/{SECRETS}"
fi
# The first task that fails ends the others; each notes its exit code and when.
srun --kill-on-bad-exit=1 --output="$logs/worker-%t.log" --error="$logs/worker-%t.log" \\
    bash "$directory/{TASK}" "$logs" {shlex.join(job.command)}
status=$?
# The job's code is that of the first failure, of one that failed by itself before one that another has ended.
failed=$(cat "$logs"/code-* 2> /dev/null | awk '$1 != 0' | sort -k 2,2n)
code=$(awk '$1 != {PEER_FAILED} && $1 != {TERMINATED} {{ print $1; exit }}' <<< "$failed")
noted=$(find "$logs" -name 'code-*' | wc -l)
if [ -z "$code" ] && [ "$status" -ne 0 ] && [ "$noted" -lt {job.tasks} ]; then
    code={WORKER_LOST}
fi
if [ -z "$code" ]; then
    code=$(awk '{{ print $1; exit }}' <<< "$failed")
fi
code=${{code:-$status}}
echo "$code" > "$logs/{CODE}"
case $code in
    {retried})
        if [ "$attempt" -le {job.retries} ] && scontrol requeue "$SLURM_JOB_ID"; then
            sleep 60 # until Slurm ends this attempt
        fi
        ;;
esac
rm -f "$directory/{SECRETS}"
exit "$code"
"""


def task_script(secret_names: Sequence[str]) -> str:
    """The script of one task: it runs the command, and notes how it ended, and when.

    Args:
        secret_names: The names of the variables that ``SECRETS`` sets; their values are replaced in the output.
    """
    return f"""\
#!/bin/bash
logs=$1
shift
{run_command(list(secret_names), '$(dirname "$logs")', forward=False)}\
printf '%s %s\\n' "$code" "$(date +%s.%N)" > "$logs/code-$SLURM_PROCID"
exit "$code"
"""


def secrets_file(variables: Mapping[str, str]) -> str:
    """What the script reads to set the secret variables.

    Args:
        variables: The variables.
    """
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _directives(job: SlurmJob) -> str:
    given = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks_per_node}",
        f'--output="{job.directory}/slurm-%j.log"',
        "--open-mode=append",
        "--requeue" if job.retries else "--no-requeue",
    ]
    if job.time_limit is not None:
        given += [f"--time={job.time_limit}", f"--signal=TERM@{WARNING_S}"]
    return "\n".join(f"#SBATCH {each}" for each in [*given, *job.options])
