"""The scripts of a Slurm job."""

import subprocess
from pathlib import Path

import pytest

from lockstep.launch.slurm_script import SlurmJob, batch_script, secrets_file, task_script
from tests.fake_cloud.shellcheck import shellcheck


def job(**changes):
    given = {"name": "my-job", "directory": Path("/shared/my jobs/x"), "command": ["echo", "it's $HOME"], "nodes": 2}
    return SlurmJob(**{**given, **changes})


@pytest.mark.parametrize(
    "text",
    [
        batch_script(job()),
        batch_script(job(environment={"A": "b 'c'"}, retries=2, time_limit="1:00:00", options=["--constraint=tpu"])),
        task_script([]),
        task_script(["HF_TOKEN", "WANDB_API_KEY"]),
    ],
    ids=["plain", "all", "task", "task with secrets"],
)
def test_shellcheck_finds_nothing(text):
    # SC2016: the user's own command may have a dollar in single quotes.
    assert shellcheck(text, "--exclude=SC2016") == ""


def test_directives():
    text = batch_script(job(tasks_per_node=4, time_limit="2-00:00:00", options=["--constraint=tpu"]))
    head = text.partition("set -u")[0].splitlines()
    assert head == [
        "#!/bin/bash",
        "#SBATCH --job-name=my-job",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        '#SBATCH --output="/shared/my jobs/x/slurm-%j.log"',
        "#SBATCH --open-mode=append",
        "#SBATCH --no-requeue",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --constraint=tpu",
    ]
    assert job(tasks_per_node=4).tasks == 8
    assert "#SBATCH --requeue" in batch_script(job(retries=1)).splitlines()


def test_secrets_survive_any_letter(tmp_path):
    value = 'a\'b "c" $HOME `x` \\ \n#'
    (tmp_path / "secrets.sh").write_text(secrets_file({"TOKEN": value}))
    done = subprocess.run(
        ["bash", "-c", '. "$0/secrets.sh"; printf %s "$TOKEN"', tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == value
