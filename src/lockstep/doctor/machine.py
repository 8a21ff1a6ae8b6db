"""One machine of a job, its versions, and what differs between the machines."""

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import jax
from packaging.requirements import Requirement

from lockstep.doctor.finding import Finding
from lockstep.hosts import FLAG_VARIABLES, environment, name_processes, tpu_chips, who_has_what
from lockstep.printable import bytes_text, without_credentials
from lockstep.redact import SECRET_NAME

FULL_BYTES: Final = 1 << 30  # free bytes of a disk below which a run will not end well
SHORT_BYTES: Final = 10 << 30  # free bytes of a disk below which there is a warning
PREFIXES: Final = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "MEGASCALE_", "LOCKSTEP_", "REQUIRE_", "HF_", "WANDB_", "NCCL_")
"""Beginnings of the variables that a run may depend on."""
PER_PROCESS: Final = frozenset(
    "LOCKSTEP_PROCESS_ID JAX_PROCESS_ID TPU_WORKER_ID TPU_PROCESS_PORT TPU_VISIBLE_CHIPS TPU_VISIBLE_DEVICES "
    "TPU_CHIPS_PER_PROCESS_BOUNDS TPU_HOST_BOUNDS MEGASCALE_SLICE_ID".split()
)
"""Variables that differ between processes by their nature."""
HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage/enabled"
HAZARDS: Final = {
    "JAX_DISABLE_JIT": "every operation is then a launch of its own",
    "JAX_DEBUG_NANS": "the host that finds a NaN computes again, operation by operation, and launches what others do "
    "not",
}
"""Variables that no run on several hosts survives for long, and why."""
TRUE: Final = frozenset("y yes t true on 1".split())
"""Values that JAX takes for true, in lower case."""


def check_host() -> Finding:
    """Say what this machine is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding.ok(
        "host", f"{socket.gethostname()}, {cores} cores, {bytes_text(memory)} memory, {platform.platform()}"
    )


def run_paths(log_dir: str = "runs", environment: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The directories that a run writes to, by what they are for."""
    paths = {"run directory": Path(log_dir), "temporary files": Path(tempfile.gettempdir())}
    if (cache := environment.get("JAX_COMPILATION_CACHE_DIR")) and "://" not in cache:
        paths["compilation cache"] = Path(cache)
    paths["Hugging Face cache"] = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return paths


def check_disks(paths: Mapping[str, Path]) -> list[Finding]:
    """A finding for each disk with its free space, and one for each directory that cannot be written to."""
    findings: list[Finding] = []
    disks: dict[int, tuple[Path, list[str]]] = {}
    for use, path in paths.items():
        there = path.absolute()
        while not there.exists():
            there = there.parent
        if not os.access(there, os.W_OK):
            text = f"the {use} {path} cannot be written to by user {os.getuid()}."
            findings.append(Finding.to_fix("disk", text, f"Change its owner, or choose another one for the {use}."))
        disks.setdefault(there.stat().st_dev, (there, []))[1].append(use)
    for path, uses in disks.values():
        usage = shutil.disk_usage(path)
        text = f"{bytes_text(usage.free)} of {bytes_text(usage.total)} free for {', '.join(uses)} ({path})"
        fix = "Delete what is old there, or put it on a larger disk."
        if usage.free < FULL_BYTES:
            findings.append(Finding.to_fix("disk", text, fix))
        elif usage.free < SHORT_BYTES:
            findings.append(Finding.warning("disk", text, fix))
        else:
            findings.append(Finding.ok("disk", text))
    return findings


def run_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that a run may depend on, without those that differ by nature; secrets without their values."""
    names = [name for name in sorted(environment) if name.startswith(PREFIXES)]
    names = [name for name in names if name not in PER_PROCESS and name not in FLAG_VARIABLES]
    return {name: "set" if SECRET_NAME.search(name) else without_credentials(environment[name]) for name in names}


def check_variables(environment: Mapping[str, str] = os.environ, chips: int | None = None) -> list[Finding]:
    """Look for variables that a run on several hosts does not survive, or that leave TPUs idle."""
    findings = []
    for name, why in HAZARDS.items():
        if environment.get(name, "").lower() in TRUE:
            text = f"{name} is {environment[name]}: {why}."
            findings.append(Finding.to_fix("variables", text, f"unset {name}."))
    chips = tpu_chips() if chips is None else chips
    if chips and environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        text = f"JAX_PLATFORMS is {environment['JAX_PLATFORMS']} on a machine with {chips} TPU chips."
        findings.append(Finding.warning("variables", text, "unset JAX_PLATFORMS, unless the CPU is meant."))
    if findings:
        return findings
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


def check_huge_pages(path: str = HUGE_PAGES, chips: int | None = None) -> list[Finding]:
    """Look at whether the kernel gives programs huge pages, without which the runtime of TPUs starts slowly."""
    if not (tpu_chips() if chips is None else chips) or not Path(path).exists():
        return []
    setting = Path(path).read_text(encoding="utf-8").strip()
    if "[always]" in setting:
        return [Finding.ok("huge pages", "transparent huge pages are on")]
    text = f"transparent huge pages are {setting}: the TPU runtime starts and ends slowly."
    return [Finding.warning("huge pages", text, f'sudo sh -c "echo always > {path}".')]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


OURS: Final = "jax-lockstep"
SHOWN_VERSIONS: Final = (OURS, "jax", "jaxlib", "libtpu", "marin-levanter")  # the packages whose versions are shown
EXTRAS: Final = {OURS: ("tpu", "levanter", "gcs", "parquet"), "jax": ("tpu",), "marin-levanter": ()}
"""The packages whose requirements are checked, with the extras whose packages must fit where they are installed."""
TWICE: Final = {"haliax": "marin-haliax", "levanter": "marin-levanter"}
"""An older package, and the one that installs the same modules."""


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared_requirements(name: str) -> Sequence[str]:
    """The requirements of an installed package, as it declares them; nothing where it is not installed."""
    try:
        return importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def check_versions(
    version: Callable[[str], str | None] = installed_version,
    requirements: Callable[[str], Sequence[str]] = declared_requirements,
) -> list[Finding]:
    """Compare the installed packages with what lockstep, jax and Levanter require: a finding for each misfit."""
    findings, number = [], 0
    for name, extras in EXTRAS.items():
        for text in requirements(name):
            needed = Requirement(text)
            if needed.marker is not None and not any(needed.marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            optional = needed.marker is not None and not needed.marker.evaluate({"extra": ""})
            have = version(needed.name)
            if have is None and optional:
                continue
            number += 1
            requirement = f"{needed.name}{needed.specifier}"
            fix = f"pip install {requirement!r} in this environment."
            if have is None:
                findings.append(
                    Finding.to_fix("versions", f"{needed.name} is missing; {name} needs {requirement}.", fix)
                )
            elif not needed.specifier.contains(have, prereleases=True):
                text = f"{needed.name} {have} is installed; {name} {version(name)} needs {requirement}."
                findings.append(Finding.to_fix("versions", text, fix))
    for old, new in TWICE.items():
        if version(old) is not None and version(new) is not None:
            text = f"{old} {version(old)} and {new} {version(new)} install the same modules, over each other."
            fix = f"pip uninstall -y {old} {new}, then pip install {new}=={version(new)}."
            findings.append(Finding.to_fix("versions", text, fix))
    if findings:
        return findings
    shown = [f"{name} {version(name)}" for name in SHOWN_VERSIONS if version(name) is not None]
    text = f"{', '.join([*shown, f'Python {platform.python_version()}'])}; {number} requirements fit"
    if version(OURS) is None:
        fix = "pip install jax-lockstep in this environment, or ignore this in a source tree."
        text = f"{OURS} is not installed as a package, so its requirements are not known; {text}"
        return [Finding.warning("versions", text, fix)]
    return [Finding.ok("versions", text)]


CLOCK_S: Final = 1.0
"""Seconds between two clocks above which messages name the wrong process as silent (`hosts/heartbeat.py`)."""
SIGNED_S: Final = 300.0  # seconds between two clocks above which cloud services refuse signed requests


def host_facts(config_digest: str) -> dict[str, dict[str, str]]:
    """The description of this host for the others."""
    device = jax.local_devices()[0]
    must = {
        **environment(),
        "configuration": config_digest,
        "device kind": device.device_kind,
        "devices of the process": str(jax.local_device_count()),
        "runtime of the devices": " ".join(str(device.client.platform_version).split()),
    }
    should = {f"variable {name}": value for name, value in run_variables().items()}
    should |= {"Python": platform.python_version(), "kernel": platform.release()}
    return {"must": must, "should": should, "own": {"host": socket.gethostname()}}


def compare(by_process: Sequence[Mapping[str, Mapping[str, str]]]) -> list[Finding]:
    """A finding for each fact that differs between hosts, with who has what; one that is ok where none does."""
    findings = []
    number = 0
    for kind in ("must", "should"):
        names = list(dict.fromkeys(name for facts in by_process for name in facts[kind]))
        number += len(names)
        for name in names:
            values = [facts[kind].get(name, "not set") for facts in by_process]
            if len(set(values)) == 1:
                continue
            text = f"{name}: {who_has_what(values)}."
            fix = "Start every process with the same command, configuration, versions and variables."
            make = Finding.to_fix if kind == "must" else Finding.warning
            findings.append(make("hosts", text, fix))
    if findings:
        return findings
    machines = len({facts["own"]["host"] for facts in by_process})
    text = f"{len(by_process)} process{'es' * (len(by_process) > 1)} on {machines} machine{'s' * (machines > 1)}"
    return [Finding.ok("hosts", f"{text}; {number} facts (versions, flags, variables, configuration) are the same")]


def compare_clocks(times: Sequence[float]) -> Finding:
    """Compare the clocks of all hosts.

    Args:
        times: The time of each process, by process number, in seconds since 1970, read just after a barrier.
    """
    middle = sorted(times)[len(times) // 2]
    spread = max(times) - min(times)
    if spread <= CLOCK_S:
        return Finding.ok("clocks", f"within {spread * 1e3:.0f} ms of each other")
    off = [f"process {i} by {t - middle:+.1f} s" for i, t in enumerate(times) if abs(t - middle) > CLOCK_S / 2]
    text = f"they differ by {spread:.1f} s: {', '.join(off)}."
    fix = "Start the time service there (systemctl restart chrony or systemd-timesyncd)."
    return Finding.to_fix("clocks", text, fix) if spread > SIGNED_S else Finding.warning("clocks", text, fix)


def judge_cache(cache: str, shared: Sequence[bool]) -> list[Finding]:
    """Say whether a host that is replaced finds the programs that the others have compiled."""
    if all(shared) or not cache:
        return []
    alone = name_processes(index for index, same in enumerate(shared) if not same)
    text = (
        f"compiled programs are kept in {cache}, which is another directory on {alone} than on process 0: a host that "
        "is replaced compiles for minutes while the others wait for it."
    )
    return [Finding.warning("compilation cache", text, "Set JAX_COMPILATION_CACHE_DIR to a gs:// URL.")]
