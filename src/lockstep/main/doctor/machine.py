"""This machine: cores, memory, disks, and the variables of the process."""

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lockstep.credentials import SECRET_NAME, without_credentials
from lockstep.hosts import FLAG_VARIABLES, tpu_chips
from lockstep.main.doctor.finding import Finding
from lockstep.printable import bytes_text

FULL_BYTES: Final = 1 << 30
"""Free bytes of a disk below which a run will not end well."""
SHORT_BYTES: Final = 10 << 30
"""Free bytes of a disk below which there is a warning."""
PREFIXES: Final = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "MEGASCALE_", "LOCKSTEP_", "REQUIRE_", "HF_", "WANDB_", "NCCL_")
"""Beginnings of the variables that a run may depend on."""
"""Parts of names of variables whose values are shown to nobody."""
PER_PROCESS: Final = frozenset(
    "LOCKSTEP_PROCESS_ID JAX_PROCESS_ID TPU_WORKER_ID TPU_PROCESS_PORT TPU_VISIBLE_CHIPS TPU_VISIBLE_DEVICES "
    "TPU_CHIPS_PER_PROCESS_BOUNDS TPU_HOST_BOUNDS MEGASCALE_SLICE_ID".split()
)
"""Variables that differ between processes by their nature."""
HAZARDS: Final = {
    "JAX_DISABLE_JIT": "every operation is then a launch of its own",
    "JAX_DEBUG_NANS": "the host that finds a NaN computes again, operation by operation, and launches what others do "
    "not",
}
"""Variables that no run on several hosts survives for long, and why."""


def check_host() -> Finding:
    """Say what this machine is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding.ok(
        "host", f"{socket.gethostname()}, {cores} cores, {bytes_text(memory)} memory, {platform.platform()}"
    )


def run_paths(log_dir: str = "runs", environment: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The directories that a run writes to, by what they are for.

    Args:
        log_dir: The parent of the run directory.
        environment: The variables of the process.
    """
    paths = {"run directory": Path(log_dir), "temporary files": Path(tempfile.gettempdir())}
    if cache := environment.get("JAX_COMPILATION_CACHE_DIR"):
        if "://" not in cache:
            paths["compilation cache"] = Path(cache)
    paths["Hugging Face cache"] = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return paths


def check_disks(paths: Mapping[str, Path]) -> list[Finding]:
    """Look at the free space of some directories and whether they can be written to.

    Args:
        paths: The directories by what they are for; one that is not there yet would be made.

    Returns:
        A finding for each disk, and one for each directory that cannot be written to.
    """
    found: list[Finding] = []
    disks: dict[int, tuple[Path, list[str]]] = {}
    for what, path in paths.items():
        there = path.absolute()
        while not there.exists():
            there = there.parent
        if not os.access(there, os.W_OK):
            text = f"the {what} {path} cannot be written to by user {os.getuid()}."
            found.append(Finding.to_fix("disk", text, f"Change its owner, or choose another one for the {what}."))
        disks.setdefault(there.stat().st_dev, (there, []))[1].append(what)
    for path, uses in disks.values():
        usage = shutil.disk_usage(path)
        text = f"{bytes_text(usage.free)} of {bytes_text(usage.total)} free for {', '.join(uses)} ({path})"
        fix = "Delete what is old there, or put it on a larger disk."
        if usage.free < FULL_BYTES:
            found.append(Finding.to_fix("disk", text, fix))
        elif usage.free < SHORT_BYTES:
            found.append(Finding.warning("disk", text, fix))
        else:
            found.append(Finding.ok("disk", text))
    return found


def run_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that a run may depend on, without those that differ by nature; secrets without their values.

    Args:
        environment: The variables of the process.
    """
    names = [name for name in sorted(environment) if name.startswith(PREFIXES)]
    names = [name for name in names if name not in PER_PROCESS and name not in FLAG_VARIABLES]
    return {name: "set" if SECRET_NAME.search(name) else without_credentials(environment[name]) for name in names}


def check_variables(environment: Mapping[str, str] = os.environ, chips: int | None = None) -> list[Finding]:
    """Look for variables that a run on several hosts does not survive, or that leave TPUs idle.

    Args:
        environment: The variables of the process.
        chips: The number of TPU chips of this machine; None to count them.
    """
    found = []
    for name, why in HAZARDS.items():
        if environment.get(name, "").lower() in ("1", "true", "yes"):
            text = f"{name} is {environment[name]}: {why}."
            found.append(Finding.to_fix("variables", text, f"unset {name}."))
    chips = tpu_chips() if chips is None else chips
    if chips and environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        text = f"JAX_PLATFORMS is {environment['JAX_PLATFORMS']} on a machine with {chips} TPU chips."
        found.append(Finding.warning("variables", text, "unset JAX_PLATFORMS, unless the CPU is meant."))
    if found:
        return found
    cache = environment.get("JAX_COMPILATION_CACHE_DIR")
    kept = (
        f"compiled programs are kept in {cache}"
        if cache
        else "compiled programs are not kept (JAX_COMPILATION_CACHE_DIR)"
    )
    flags = [flag for name in FLAG_VARIABLES for flag in environment.get(name, "").split()]
    number = _plural(len(run_variables(environment)), "variable")
    text = f"{number} of JAX, TPU, Hugging Face and W&B, {_plural(len(flags), 'compiler flag')}; {kept}"
    return [Finding.ok("variables", text)]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
