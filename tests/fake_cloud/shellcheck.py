"""What shellcheck, installed beside this Python, finds in a script."""

import subprocess
import sys
from pathlib import Path


def shellcheck(text: str, *options: str) -> str:
    """What shellcheck says about a script; empty where it finds nothing."""
    command = [str(Path(sys.executable).parent / "shellcheck"), *options, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
