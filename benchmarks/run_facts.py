"""When, where and from what a benchmark's figures came; no host's name and no path of the machine."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sizes import IS_SMALLEST, SMALLEST

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "numpy")

_DIRECTORIES = re.compile(r"(^|[=\s,'\"\[{(])(?:~|/)[^\s,'\"\]})]*/")
"""The directories of an absolute path, at the beginning of a text or after what may stand before one."""


def run_facts() -> dict[str, Any]:
    """Return the facts of this process' run, as they are at its end, when results are written.

    Returns:
        ``date`` (of now, with the offset from UTC), ``command``, ``machine`` (``cpu``, ``cores`` that the process may
        use, ``system``) and ``versions``: of Python, of `PACKAGES`, None for one that is not installed, and the commit
        of Lockstep, with ``+`` where files that git follows have been changed.
    """
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": (f"{SMALLEST}=1 " if IS_SMALLEST else "") + command(_module(), sys.argv[1:]),
        "machine": {"cpu": _cpu(), "cores": _cores(), "system": f"{platform.system()} {platform.machine()}"},
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "lockstep": _commit(),
        },
    }


def command(module: str, arguments: list[str]) -> str:
    """Return a command line that others can use.

    Args:
        module: The module that ran.
        arguments: Its arguments; of absolute paths in them the last part stays.
    """
    return shlex.join(["python", "-m", module, *(_DIRECTORIES.sub(r"\1", each) for each in arguments)])


def _module() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _cpu() -> str:
    """The processor's model as Linux names it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """None outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
