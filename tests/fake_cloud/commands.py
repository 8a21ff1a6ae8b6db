"""Commands that run a Python script of the tests, to be put on PATH."""

import os
import shlex
import sys
from pathlib import Path

LOADER = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
"""The variables without which a Python of conda, or one that was built here, may not start."""


def write_command(file: Path, *words: str | Path) -> None:
    """Write a command that starts this Python, whatever its path has and whatever is left of the environment.

    Args:
        words: What Python is given before the command's own arguments.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in LOADER.items())
    file.write_text(
        f'#!/bin/sh\n{exports}exec {shlex.join([sys.executable, *map(str, words)])} "$@"\n', encoding="utf-8"
    )
    file.chmod(0o755)
