"""Slurm's commands for tests: jobs run as processes of this machine, each task in a home directory of its own.

``install(directory)`` puts sbatch, squeue, scancel, scontrol, sacct and srun there. The state of all jobs is in the
directory ``$FAKE_SLURM``; the number of the first is ``$FAKE_SLURM_FIRST``, or 1000. Faults: ``$FAKE_SLURM_REFUSES`` is
what sbatch answers instead of taking a job; ``$FAKE_SLURM_LOSES_NODE`` is the number of a task whose node fails half a
second after the first start. With the file ``away`` there, the controller does not answer squeue, once.

What it does not have: partitions, accounts, priorities, time limits. ``KillWait`` is one second.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "srun")
KILL_WAIT_S = 1.0


def install(directory: Path) -> None:
    """Make the commands in a directory, which belongs on PATH."""
    from tests.fake_cloud.commands import write_command  # which the commands themselves cannot import

    directory.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        write_command(directory / name, "-S", __file__, name)


def home() -> Path:
    return Path(os.environ["FAKE_SLURM"])


def job_directory(number: str) -> Path:
    directory = home() / number
    if not directory.is_dir():
        sys.exit(f"slurm_load_jobs error: Invalid job id specified: {number}")
    return directory


def state(directory: Path) -> str:
    return (directory / "state").read_text()


def set_state(directory: Path, text: str) -> None:
    new = directory / f"state.{os.getpid()}"
    new.write_text(text)
    new.replace(directory / "state")


def option(words: list[str], name: str, default: str = "") -> str:
    """The value of ``--name=value``, the last where it is there several times."""
    found = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found[-1] if found else default


def sbatch(words: list[str]) -> int:
    if refusal := os.environ.get("FAKE_SLURM_REFUSES"):
        sys.exit(f"sbatch: error: {refusal}")
    script = Path(words[-1])
    directives = re.findall(r"^#SBATCH (.*)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    given = [word for line in directives for word in shlex.split(line)] + words[:-1]
    number = str(int(os.environ.get("FAKE_SLURM_FIRST", "1000")) + len(list(home().glob("*"))))
    directory = home() / number
    directory.mkdir(parents=True)
    (directory / "given").write_text("\n".join(given))
    set_state(directory, "PENDING")
    # The controller outlives this command, as Slurm's does.
    subprocess.Popen(
        [sys.executable, "-S", __file__, "controller", number, str(script)],
        cwd=option(given, "chdir", os.getcwd()), start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=(directory / "controller.log").open("w"),
    )  # fmt: skip
    print(number if "--parsable" in words else f"Submitted batch job {number}")
    return 0


def controller(words: list[str]) -> int:
    """Run a job, and again where it was requeued."""
    number, script = words
    directory = job_directory(number)
    given = (directory / "given").read_text().splitlines()
    nodes, each = int(option(given, "nodes", "1")), int(option(given, "ntasks-per-node", "1"))
    log = option(given, "output", f"slurm-{number}.log").replace("%j", number)
    restarts = 0
    while True:
        if (directory / "cancelled").exists():
            set_state(directory, "CANCELLED")
            return 0
        if state(directory) == "PENDING":
            set_state(directory, "RUNNING")
        environment = {
            **os.environ,
            "SLURM_JOB_ID": number,
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS": str(nodes * each),
        }
        if restarts:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        with open(log, "a", encoding="utf-8") as output:
            batch = subprocess.Popen(
                ["bash", script], env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        (directory / "batch").write_text(str(batch.pid))
        if (directory / "cancelled").exists():  # while it was started; later ones are scancel's to end
            kill(batch.pid, signal.SIGKILL)
        code = batch.wait()
        if (directory / "requeue").exists():
            (directory / "requeue").unlink()
            restarts += 1
            set_state(directory, "PENDING")
            continue
        cancelled = (directory / "cancelled").exists()
        set_state(directory, "CANCELLED" if cancelled else "COMPLETED" if code == 0 else "FAILED")
        return 0


def srun(words: list[str]) -> int:
    """Run every task; the first that fails ends the others."""
    at = next(index for index, word in enumerate(words) if not word.startswith("--"))
    options, command = words[:at], words[at:]
    directory = job_directory(os.environ["SLURM_JOB_ID"])
    lost = os.environ.get("FAKE_SLURM_LOSES_NODE", "") if "SLURM_RESTART_COUNT" not in os.environ else ""
    tasks = []
    for rank in range(int(os.environ["SLURM_NTASKS"])):
        own_home = directory / f"home-{rank}"
        own_home.mkdir(exist_ok=True)
        nodes = int(os.environ["SLURM_NNODES"])
        each = int(os.environ["SLURM_NTASKS"]) // nodes
        place = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % each),
            "SLURM_NODEID": str(rank // each),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        }
        with open(option(options, "output").replace("%t", str(rank)), "ab") as log:
            tasks.append(
                subprocess.Popen(
                    command, env={**os.environ, **place, "HOME": str(own_home)}, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
    (directory / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    begin, killing = time.monotonic(), None
    while any(task.poll() is None for task in tasks):
        if lost and time.monotonic() - begin > 0.5:
            kill(tasks[int(lost)].pid, signal.SIGKILL)
        if killing is None and any(task.poll() for task in tasks):
            killing = time.monotonic()
            for task in tasks:
                kill(task.pid, signal.SIGTERM)
        if killing is not None and time.monotonic() - killing > KILL_WAIT_S:
            for task in tasks:
                kill(task.pid, signal.SIGKILL)
        time.sleep(0.02)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


def kill(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def scancel(words: list[str]) -> int:
    directory = job_directory(words[-1])
    if state(directory) not in ("PENDING", "RUNNING"):
        return 0
    (directory / "cancelled").touch()
    set_state(directory, "CANCELLED")
    tasks, batch = (pids(directory / name) for name in ("tasks", "batch"))
    for pid in tasks:
        kill(pid, signal.SIGKILL if "--signal=KILL" in words else signal.SIGTERM)
    end = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < end and any(map(alive, tasks)):
        time.sleep(0.02)
    for pid in [*tasks, *batch]:
        kill(pid, signal.SIGKILL)
    return 0


def pids(file: Path) -> list[int]:
    """The process groups in a file; none where nothing was started yet."""
    return [int(pid) for pid in file.read_text(encoding="utf-8").split()] if file.exists() else []


def alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def scontrol(words: list[str]) -> int:
    assert words[0] == "requeue", words
    directory = job_directory(words[1])
    if "--no-requeue" in (directory / "given").read_text().splitlines():
        sys.exit("Job has been configured to not requeue")
    (directory / "requeue").touch()
    kill(int((directory / "batch").read_text()), signal.SIGTERM)
    return 0


def squeue(words: list[str]) -> int:
    if (home() / "away").exists():
        (home() / "away").unlink()
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    directory = job_directory(option(words, "jobs"))
    shown = state(directory)
    if shown in ("PENDING", "RUNNING"):
        print(f"{shown} ({'Priority' if shown == 'PENDING' else 'None'})")
        (directory / f"shown-{shown}").touch()
    return 0


def sacct(words: list[str]) -> int:
    print(state(job_directory(words[words.index("-j") + 1])))
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
