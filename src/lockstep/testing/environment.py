"""How the processes of tests are launched."""

import sys
from pathlib import Path

DIRECTORY = Path.cwd()
"""The working directory of the processes: that in which the test run began, wherever a test has gone since."""
GRACE_S = 3
"""Seconds between SIGTERM and SIGKILL."""


def launch_command(processes: int, devices: int, log_dir: Path) -> list[str]:
    """Return a command of ``lockstep launch`` that lacks only the words of what it launches on this machine.

    Args:
        processes: How many.
        devices: The CPU devices of each.
        log_dir: The directory in which each process has its log.
    """
    command = [sys.executable, "-c", "import sys; from lockstep.launch import main; sys.exit(main())"]
    command += ["--backend", "local", "--processes", str(processes), "--devices_per_process", str(devices)]
    return [*command, "--prefix", "always", "--log_dir", str(log_dir), "--grace_s", str(GRACE_S), "--"]
