"""Join the job: ``jax.distributed`` where there are several processes, and a check that all of them are there."""

import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

import jax

from lockstep.errors import ConfigError, HostError, HostTimeoutError
from lockstep.hosts._client import Client, JaxClient, MemoryClient, backend_is_running, service_is_running
from lockstep.hosts.peers import watch_peers
from lockstep.hosts.session import Hosts

COORDINATOR_ADDRESS = "LOCKSTEP_COORDINATOR_ADDRESS"
NUM_PROCESSES = "LOCKSTEP_NUM_PROCESSES"
PROCESS_ID = "LOCKSTEP_PROCESS_ID"
REQUIRE_MULTIHOST = "REQUIRE_MULTIHOST"
REQUIRE_PROCESS_COUNT = "REQUIRE_JAX_PROCESS_COUNT"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How this process finds the others, and how many there must be (``trainer.distributed`` in YAML).

    Raises:
        ConfigError: a value that cannot work.
    """

    require_multihost: bool = False
    """Refuse to run as a single process. The environment variable REQUIRE_MULTIHOST=1 does the same."""
    require_process_count: int | None = None
    """Refuse to run with another number of processes; null accepts any. REQUIRE_JAX_PROCESS_COUNT=N does the same."""
    timeout_s: float = 300.0
    """Seconds that any wait for other processes may last."""
    initialization_timeout_s: int = 300
    """Seconds to wait at the start until every process has connected."""
    heartbeat_timeout_s: int = 100
    """Seconds after which a process that gives no sign of life is taken for dead, and the job ends."""
    coordinator_address: str | None = None
    """host:port of process 0; null reads LOCKSTEP_COORDINATOR_ADDRESS, then asks the cluster (TPU, Slurm, GKE, MPI)."""
    num_processes: int | None = None
    """Processes of the job; null reads LOCKSTEP_NUM_PROCESSES, then asks the cluster."""
    process_id: int | None = None
    """This process's number from 0; null reads LOCKSTEP_PROCESS_ID, then asks the cluster."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "initialization_timeout_s", "heartbeat_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"distributed.{name} is {getattr(self, name)}; it must be more than 0 seconds. Leave it out to get "
                    "the default."
                )
        for name in ("require_process_count", "num_processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"distributed.{name} is {value}; it must be at least 1. Leave it out to accept any.")


_hosts: Hosts | None = None
_stop_watching: Callable[[], None] | None = None  # None until start() has succeeded


def start(config: DistributedConfig | None = None) -> Hosts:
    """Join the job and return its ``Hosts``; called again, return the same with the new ``timeout_s``.

    Call it before any JAX computation. A plain ``python`` process needs no service and starts none. Where the user has
    called ``jax.distributed.initialize`` already, that service is used.

    Args:
        config: None for the defaults.

    Returns:
        The processes of the job, seen from this one. One line about this process goes to standard error.

    Raises:
        ConfigError: on every process: the number of processes is not the required one, or an incomplete or impossible
            address was given.
        HostTimeoutError: not every process connected within ``initialization_timeout_s``.
    """
    global _hosts, _stop_watching
    if _hosts is not None and _stop_watching is not None:
        _check_count(config or DistributedConfig(), _hosts.count)
        _hosts.timeout_s = config.timeout_s if config else _hosts.timeout_s
        return _hosts
    config = config or DistributedConfig()
    if not service_is_running():
        _initialize(config)
        _hosts = None  # what current() may have made for a process that was alone until now
    _hosts = current()
    _check_count(config, _hosts.count)
    _hosts.timeout_s = config.timeout_s
    client = _hosts.client
    _hosts.phase("starting devices")
    print(
        f"lockstep: process {client.index} of {client.count} on {socket.gethostname()}: backend "
        f"{jax.default_backend()}, {jax.local_device_count()} of {jax.device_count()} devices are local",
        file=sys.stderr,
        flush=True,
    )
    _hosts.phase("started")
    _stop_watching = watch_peers(client) if client.count > 1 else _nothing
    return _hosts


def current() -> Hosts:
    """The job's ``Hosts``: that of ``start``, else one over the service that the user has started, else one process."""
    global _hosts
    if _hosts is None:
        _hosts = Hosts(_client())
    return _hosts


def shutdown() -> None:
    """Leave the job in order: wait for every process, then end the service. Does nothing for a single process.

    Raises:
        HostTimeoutError: not all processes came to their end in time.
    """
    global _hosts, _stop_watching
    hosts, _hosts = _hosts, None
    stop_watching, _stop_watching = _stop_watching, None
    if hosts is not None and hosts.count > 1:
        hosts.phase("leaving")
        hosts.barrier("shutdown")
        with contextlib.suppress(HostError, TimeoutError):
            hosts.client.delete("lockstep")
    if stop_watching is not None:
        stop_watching()
    if service_is_running():
        jax.distributed.shutdown()


def _nothing() -> None:
    """A process alone watches nobody."""


def _client() -> Client:
    if service_is_running():
        return JaxClient()
    if backend_is_running() and jax.process_count() > 1:
        raise ConfigError(
            f"JAX sees {jax.process_count()} processes, but jax.distributed is not initialized, so they cannot talk to "
            "each other. Call lockstep.hosts.start() before the first JAX computation."
        )
    return MemoryClient.hub(1)[0]


def _initialize(config: DistributedConfig) -> None:
    """Start ``jax.distributed`` from config, environment or cluster, or find that we are alone."""
    address = config.coordinator_address or os.environ.get(COORDINATOR_ADDRESS)
    count = config.num_processes if config.num_processes is not None else _integer(os.environ, NUM_PROCESSES)
    index = config.process_id if config.process_id is not None else _integer(os.environ, PROCESS_ID)
    given = {"coordinator_address": address, "num_processes": count, "process_id": index}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        if not backend_is_running():
            _initialize_from_cluster(config)
        return
    if missing:
        raise ConfigError(
            f"distributed.{' and distributed.'.join(missing)} is not set, but {given} is. Set all three (or the "
            f"variables {COORDINATOR_ADDRESS}, {NUM_PROCESSES}, {PROCESS_ID}), or none to ask the cluster."
        )
    assert address is not None and count is not None and index is not None
    if not 0 <= index < count:
        raise ConfigError(
            f"distributed.process_id is {index}; with {count} processes it must be 0 to {count - 1}. Give every "
            "process a number of its own."
        )
    _check_count(config, count)  # before a wait that would end in a time-out
    if count == 1:
        return
    if backend_is_running():
        raise ConfigError(
            f"process {index} of {count} has used JAX before lockstep.hosts.start(), so it is too late to join the "
            "others. Call start() first (also before jax.devices())."
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with _connecting(config, f"the {count} processes of the job (coordinator {address})"):
        jax.distributed.initialize(
            address,
            count,
            index,
            cluster_detection_method="deactivate",
            initialization_timeout=config.initialization_timeout_s,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        )


def _initialize_from_cluster(config: DistributedConfig) -> None:
    """TPU pods, GKE, Slurm and MPI, as JAX finds them."""
    try:
        with _connecting(config, "the processes of this cluster job"):
            jax.distributed.initialize(
                initialization_timeout=config.initialization_timeout_s,
                heartbeat_timeout_seconds=config.heartbeat_timeout_s,
            )
    except ValueError as error:
        # How JAX says that it found no cluster: this is a plain process.
        if "should be defined" not in str(error) and "must be defined" not in str(error):
            raise


@contextlib.contextmanager
def _connecting(config: DistributedConfig, whom: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise HostTimeoutError(
            f"not all of {whom} connected within {config.initialization_timeout_s} s. Was the command started on every "
            "worker (gcloud ... --worker=all, infra/launch.py), and can they reach the coordinator? Raise "
            f"distributed.initialization_timeout_s if they only start slowly. JAX says: {error}"
        ) from error


def _check_count(config: DistributedConfig, count: int) -> None:
    """The guardrails against a launch on only some of the workers."""
    fix = (
        "Start the command on every worker (gcloud ... --worker=all, infra/launch.py), or change the requirement if "
        "this size is meant."
    )
    if count == 1 and (config.require_multihost or _flag(os.environ, REQUIRE_MULTIHOST)):
        raise ConfigError(
            "this job has 1 process, but distributed.require_multihost (or REQUIRE_MULTIHOST=1) requires at least 2. "
            + fix
        )
    wanted = {
        "distributed.require_process_count": config.require_process_count,
        REQUIRE_PROCESS_COUNT: _integer(os.environ, REQUIRE_PROCESS_COUNT),
    }
    for name, required in wanted.items():
        if required is not None and count != required:
            raise ConfigError(f"this job has {count} process(es), but {name} requires {required}. {fix}")


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the variable {name} is {text!r}; it must be a whole number.") from None


def _flag(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").strip().lower()
    if text in ("", "0", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise ConfigError(f"the variable {name} is {text!r}; use 1 to require it and 0 not to.")
