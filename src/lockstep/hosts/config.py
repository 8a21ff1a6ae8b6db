"""The job that a process joins: its address, the number of processes, the GPUs of one, and what all must share."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import jax

from lockstep.config_fields import check_fields, encode_config
from lockstep.errors import ConfigError, check_at_least
from lockstep.hosts.exchange import digest
from lockstep.hosts.tls import TlsConfig

COORDINATOR_ADDRESS = "LOCKSTEP_COORDINATOR_ADDRESS"
NUM_PROCESSES = "LOCKSTEP_NUM_PROCESSES"
PROCESS_ID = "LOCKSTEP_PROCESS_ID"
INITIALIZATION_TIMEOUT_S = "LOCKSTEP_INITIALIZATION_TIMEOUT_S"
"""Set by the launcher for machines that do not all come up at once: other seconds than 300."""
REQUIRE_MULTIHOST = "REQUIRE_MULTIHOST"
REQUIRE_PROCESS_COUNT = "REQUIRE_JAX_PROCESS_COUNT"
SLICES = "MEGASCALE_NUM_SLICES"
WORLD_SIZE = "WORLD_SIZE"
"""Set by torchrun, of which JAX knows nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The address of the job, and the number of its processes (``trainer.distributed`` in YAML).

    Raises:
        ConfigError: A value cannot work.

    Example:
        >>> lockstep.DistributedConfig(require_process_count=8).timeout_s
        300.0
    """

    require_multihost: bool = False
    """Refuse to run as a single process. The environment variable REQUIRE_MULTIHOST=1 does the same."""
    require_process_count: int | None = None
    """Refuse to run with another number of processes of a slice; null accepts any. REQUIRE_JAX_PROCESS_COUNT=N does the
    same for those of all slices (MEGASCALE_NUM_SLICES)."""
    timeout_s: float = 300.0
    """Seconds that any wait for other processes may last."""
    initialization_timeout_s: int = dataclasses.field(
        default_factory=lambda: environment_integer(INITIALIZATION_TIMEOUT_S) or 300
    )
    """Seconds to wait at the start until every process has connected; the default is 1800 where `lockstep launch` has
    started the job on other machines (LOCKSTEP_INITIALIZATION_TIMEOUT_S), else 300."""
    heartbeat_timeout_s: int = 100
    """Seconds after which a process that gives no sign of life is taken for dead, and the job ends."""
    debug: bool = False
    """Compare what every process is about to launch before each launch of the library's programs, which costs a wait
    of some milliseconds. A difference is then an error before it can hang the job; else it is found after the round."""
    coordinator_address: str | None = None
    """host:port of process 0; null reads LOCKSTEP_COORDINATOR_ADDRESS, then asks the cluster (TPU, Slurm, GKE, MPI)."""
    num_processes: int | None = None
    """Processes of the job; null reads LOCKSTEP_NUM_PROCESSES, then asks the cluster."""
    process_id: int | None = None
    """This process's number from 0; null reads LOCKSTEP_PROCESS_ID, then asks the cluster."""
    tls: TlsConfig | None = None
    """Certificates of the processes, which encrypt the coordination service (jax 0.12); null reads JAX_MTLS_CERT_FILE,
    JAX_MTLS_KEY_FILE, JAX_MTLS_CA_FILE and JAX_MTLS_PEER_URI_PREFIX, without which it is not encrypted."""

    def __post_init__(self) -> None:
        check_fields(self, "distributed.")
        waits, counts = (
            ("timeout_s", "initialization_timeout_s", "heartbeat_timeout_s"),
            ("require_process_count", "num_processes"),
        )
        default = " seconds. Leave it out to get the default."
        check_at_least(self, 0, *waits, block="distributed.", fix=default, above=True)
        check_at_least(self, 1, *counts, block="distributed.", fix=". Leave it out to accept any.")


def check_count(config: DistributedConfig, count: int) -> None:
    """Refuse a job that was started on only some of the workers."""
    fix = (
        "Start the command on every worker (gcloud ... --worker=all, infra/launch.py), or change the requirement if "
        "this size is meant."
    )
    if count == 1 and (config.require_multihost or environment_flag(REQUIRE_MULTIHOST)):
        raise ConfigError(
            "this job has 1 process, but distributed.require_multihost (or REQUIRE_MULTIHOST=1) requires at least 2. "
            + fix
        )
    required_counts = {
        "distributed.require_process_count": required_count(config),
        REQUIRE_PROCESS_COUNT: environment_integer(REQUIRE_PROCESS_COUNT),
    }
    for name, required in required_counts.items():
        if required is not None and count != required:
            raise ConfigError(f"this job has {count} process(es), but {name} requires {required}. {fix}")


def check_launched(count: int) -> None:
    """Refuse to go on where a launcher has started more processes than have joined the job.

    Each of them would believe that it is the leader, and write every row. REQUIRE_JAX_PROCESS_COUNT says that ``count``
    is meant.

    Raises:
        ConfigError: Names the launcher's variable, both numbers and the call that is missing.
    """
    check_count(DistributedConfig(), count)
    launched = launched_count()
    if launched is None or launched[1] <= count or environment_integer(REQUIRE_PROCESS_COUNT) == count:
        return
    variable, processes = launched
    call = "lockstep.start(), with Levanter lockstep.levanter.start(trainer_config),"
    if variable == WORLD_SIZE:
        call = (
            "lockstep.start(lockstep.DistributedConfig(coordinator_address=f\"{os.environ['MASTER_ADDR']}:8476\", "
            "num_processes=int(os.environ['WORLD_SIZE']), process_id=int(os.environ['RANK'])))"
        )
    raise ConfigError(
        f"{processes} processes were started (the variable {variable}), but the job of this one has {count}: each "
        f"would take itself for the leader and write every row. Call {call} before the first use of JAX. If they are "
        f"jobs of their own, set {REQUIRE_PROCESS_COUNT}={count}."
    )


def launched_count() -> tuple[str, int] | None:
    """The variable in which the innermost launcher says how many processes it has started, and their number."""
    slurm_step = all(f"SLURM_{name}" in os.environ for name in ("JOB_ID", "STEP_NODELIST", "PROCID", "LOCALID"))
    variables = [NUM_PROCESSES, *([WORLD_SIZE] if "RANK" in os.environ else []), "OMPI_COMM_WORLD_SIZE"]
    for name in [*variables, *(["SLURM_NTASKS"] if slurm_step else [])]:
        if (count := environment_integer(name)) is not None:
            return name, count
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if workers := [worker for worker in os.environ.get(name, "").split(",") if worker.strip()]:
            return name, len(workers) * (environment_integer(SLICES) or 1)
    return None


def required_count(config: DistributedConfig) -> int | None:
    """The number of processes of all slices that the configuration requires; None: it accepts any."""
    required = config.require_process_count
    return None if required is None else required * (environment_integer(SLICES) or 1)


def local_gpus(index: int | None = None, count: int | None = None) -> list[int] | None:
    """GPUs of this process among those that it sees, where Slurm has started it.

    JAX's own rule gives each task the one GPU that has its number on the node. So a task that has a node to itself
    would leave the others idle, and a task that is bound to a GPU of its own, which it sees as 0, would find none.

    Args:
        index: The number of this process, where it was given and not read from Slurm.
        count: The number of processes, likewise.

    Returns:
        What ``jax.distributed.initialize`` takes: [] for all; None where it is to decide (JAX_LOCAL_DEVICE_IDS, or a
        job that is not a step of Slurm).

    Raises:
        ConfigError: The tasks of this node cannot share its GPUs in equal parts.
    """
    local = environment_integer("SLURM_LOCALID")
    step = (environment_integer("SLURM_PROCID"), environment_integer("SLURM_NTASKS"))
    if local is None or "JAX_LOCAL_DEVICE_IDS" in os.environ or (count is not None and step != (index, count)):
        return None
    tasks = _tasks_on_node(step[1])
    if tasks == 1:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ROCR_VISIBLE_DEVICES")
    if tasks is None or visible is None:
        return [local]
    gpus = visible.count(",") + 1
    if gpus < (environment_integer("SLURM_GPUS_ON_NODE") or tasks):  # bound: --gpus-per-task, --gpu-bind
        return []
    if gpus % tasks:
        raise ConfigError(
            f"{tasks} tasks of this node share {gpus} GPUs ({visible}), which cannot be split into equal parts. Start "
            f"one task per GPU (--ntasks-per-node={gpus}) or one per node (--ntasks-per-node=1)."
        )
    return [*range(gpus // tasks * local, gpus // tasks * (local + 1))]


def _tasks_on_node(tasks: int | None) -> int | None:
    """Tasks of Slurm's step on this node, of ``tasks`` in all; None where Slurm does not say."""
    layout = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or ""
    counts = []
    for tasks_per_node, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):  # 8(x2),4 is 8, 8 and 4
        counts += [int(tasks_per_node)] * int(times or 1)
    node = environment_integer("SLURM_NODEID") or 0
    if node < len(counts):
        return counts[node]
    return 1 if tasks is not None and tasks == (environment_integer("SLURM_STEP_NUM_NODES") or 1) else None


def environment_integer(name: str) -> int | None:
    """Read a whole number from an environment variable; None where it is unset or empty."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the variable {name} is {text!r}; it must be a whole number.") from None


def environment_flag(name: str) -> bool:
    """Return whether an environment variable says yes."""
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise ConfigError(f"the variable {name} is {text!r}; use 1 to require it and 0 not to.")


def config_digest(config: Any) -> str:
    """Digest of all of a run's configuration that must be the same on every process.

    Args:
        config: A configuration with a ``trainer.distributed`` block, which may tell each process its own number and
            so is left out.
    """
    values = encode_config(config)
    del values["trainer"]["distributed"]
    return digest(repr(values))


FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
DISTRIBUTIONS = ("jax", "jaxlib", "libtpu", "numpy", "transformers", "tokenizers")
"""Packages whose versions must be equal: of what compiles, draws random rows, and finds tokens and stop strings."""
OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
"""Settings of JAX that change what is compiled."""
_PER_PROCESS_FLAGS = ("--xla_dump", "--xla_gpu_dump")
"""Beginnings of flags that may differ between processes, such as a directory for dumps, and change no program."""


def environment() -> dict[str, str]:
    """Return all that must be the same on every host for its programs and its tokens to be the same.

    Returns:
        By name, short texts and a digest of our source. Each flag of ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` has an
        entry of its own, so that an error can name the one that differs.
    """
    options = {
        f"compile option {name}": str(getattr(jax.config, name)) for name in OPTIONS if hasattr(jax.config, name)
    }
    return {**_versions_and_source(), **_flags(), **options}


@functools.cache
def _versions_and_source() -> dict[str, str]:
    """Return what cannot change while the process lives."""
    total = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        total.update(f"{path.relative_to(package).as_posix()} {path.stat().st_size}\n".encode())
        total.update(path.read_bytes())
    return {**{f"{name} version": _version(name) for name in DISTRIBUTIONS}, "code of lockstep": total.hexdigest()}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _flags() -> dict[str, str]:
    flags = {}
    for variable in FLAG_VARIABLES:
        for flag in os.environ.get(variable, "").split():
            name, _, value = flag.partition("=")
            if not name.startswith(_PER_PROCESS_FLAGS):
                flags[f"{variable} {name}"] = value or "set"
    return flags
