"""The package as a program."""

import subprocess
import sys


def test_the_package_runs_as_the_command():
    ended = subprocess.run([sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.startswith("lockstep ") and not ended.stderr
