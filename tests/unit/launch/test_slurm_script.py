"""The scripts of a Slurm job."""

import subprocess
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.slurm_script import SlurmJob, batch_script, secrets_file, task_script
from tests.fake_cloud.shellcheck import shellcheck


def job(**changes):
    given = {"name": "my-job", "directory": Path("/shared/my jobs/x"), "command": ["echo", "it's $HOME"], "nodes": 2}
    return SlurmJob(**{**given, **changes})


@pytest.mark.parametrize(
    "text",
    [
        batch_script(job()),
        batch_script(
            job(
                environment={"A": "b 'c'"},
                has_secrets=True,
                retries=2,
                time_limit="1:00:00",
                options=["--constraint=tpu"],
            )
        ),
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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"time_limit": "1:00\ntouch pwned"}, "--time_limit is '1:00\\\\ntouch pwned'; it must be minutes, min"),
        ({"time_limit": "1:00 --uid=0"}, "--time_limit is '1:00 --uid=0'"),
        ({"options": ["--constraint=tpu\ntouch pwned"]}, r"--sbatch is '--constraint=tpu.*one option on one line"),
        ({"options": ["touch pwned"]}, "--sbatch is 'touch pwned'"),
        ({"directory": Path('/jobs/a" --uid=0 "')}, "the job's directory is .* LOCKSTEP_JOBS_DIR"),
    ],
)
def test_what_would_be_another_line_of_the_script_is_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        job(**changes)
    for limit in ("30", "1:00", "2-00", "2-12:30:00", "UNLIMITED"):
        assert job(time_limit=limit)


def test_no_variable_of_the_job_replaces_one_of_the_script(tmp_path):
    """A job with its own ``logs`` or ``directory`` would have read another file of secrets, and noted no code."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s|" "$directory" "$logs" "$attempt" "$A_KEY"\n')
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "secrets.sh").write_text(secrets_file({"A_KEY": "secret", "attempt": "'9'\n"}))
    given = {"directory": "elsewhere", "logs": "a\nb; touch pwned"}
    text = batch_script(job(directory=tmp_path, environment=given, has_secrets=True))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("elsewhere|a\nb; touch pwned|'9'\n|secret|", "")
    assert {path.name for path in tmp_path.iterdir()} == {"srun", "attempt-1"}
    assert (tmp_path / "attempt-1/code").read_text() == "0\n"
    again = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "the job's secrets are gone" in again.stdout


def test_secrets_survive_any_letter(tmp_path):
    value = 'a\'b "c" $HOME `x` \\ \n#'
    (tmp_path / "secrets.sh").write_text(secrets_file({"TOKEN": value}))
    done = subprocess.run(
        ["bash", "-c", '. "$0/secrets.sh"; printf %s "$TOKEN"', tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == value


def test_a_task_that_slurm_ends_as_it_notes_its_end_notes_when(tmp_path):
    (tmp_path / "date").write_text('#!/bin/bash\nkill -TERM $$\nexec /bin/date "$@"\n')
    (tmp_path / "date").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_PROCID": "3"}
    done = subprocess.run(["bash", "-c", task_script([]), "task", str(tmp_path), "bash", "-c", "exit 87"], env=env)
    code, at = (tmp_path / "code-3").read_text().split()
    assert done.returncode == int(code) == 87 and float(at) > 0
