"""Join the job: ``jax.distributed`` where there are several processes, and a check that all of them are there."""

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import jax

from lockstep.errors import ConfigError, HostError, HostTimeoutError
from lockstep.exits import PEER_FAILED
from lockstep.hosts._client import (
    Client,
    JaxClient,
    MemoryClient,
    backend_is_running,
    bind_address,
    cluster_address,
    service_is_running,
    tpu_chips,
)
from lockstep.hosts.config import (
    COORDINATOR_ADDRESS,
    NUM_PROCESSES,
    PROCESS_ID,
    REQUIRE_PROCESS_COUNT,
    DistributedConfig,
    check_count,
    check_launched,
    environment_integer,
    local_gpus,
    required_count,
)
from lockstep.hosts.exchange import name_processes
from lockstep.hosts.exit import end_job_on_uncaught_errors
from lockstep.hosts.hosts import Hosts
from lockstep.hosts.liveness import ANSWER_S, say_who_is_missing, service_answers
from lockstep.hosts.peers import end_process, watch_peers
from lockstep.hosts.tls import TlsArguments, tls_arguments
from lockstep.printable import print_to_stderr

TLS_ADVICE = (
    " Do the certificates of distributed.tls belong together: of one authority, valid today, and with a name of the "
    "coordinator's host or a URI of peer_uri_prefix? gRPC does not say which does not."
)
ABORT_MARGIN_S = 30  # seconds that JAX waits longer for connections than we do: its abort does not say what to do

_hosts: Hosts | None = None
_stop_watching: Callable[[], None] | None = None  # None until start() has succeeded


def start(config: DistributedConfig | None = None) -> Hosts:
    """Join the job and return its ``Hosts``; called again, return the same with the new settings.

    Call it before any JAX computation. A plain ``python`` process needs no service and starts none. Where the user has
    called ``jax.distributed.initialize`` already, that service is used.

    Args:
        config: How the processes find each other, and how long they wait; None for the defaults.

    Returns:
        The processes of the job, seen from this one. One line about this process goes to standard error.

    Raises:
        ConfigError: On every process: the number of processes is not the required one, or an incomplete or impossible
            address was given. On this one: it has TPU chips, but JAX runs on the CPU, and nobody asked for that.
        HostError: On every process: JAX's devices are not those of this job's processes.
        HostTimeoutError: The coordinator refused, or a process did not start its devices. (When processes are missing
            for ``initialization_timeout_s``, the process prints the same text and ends with code 85, which the launcher
            tries again: JAX is waiting and cannot be interrupted.)

    Example:
        >>> hosts = lockstep.start()  # before the first use of JAX
        >>> hosts.index, hosts.count, hosts.is_leader
        (0, 1, True)
    """
    global _hosts, _stop_watching
    if _hosts is not None and _stop_watching is not None:
        check_count(config or DistributedConfig(), _hosts.count)
        if config is not None:
            _hosts.timeout_s, _hosts.debug = config.timeout_s, config.debug
        return _hosts
    config = config or DistributedConfig()
    if not service_is_running():
        _initialize(config)
        _hosts = None  # what current() may have made for a process that was alone until now
    _hosts = current_without_devices()
    check_count(config, _hosts.count)
    _hosts.timeout_s, _hosts.debug = config.timeout_s, config.debug
    client = _hosts.client
    _stop_watching = _watch(_hosts) if client.count > 1 else _nothing
    _hosts.phase("starting devices")  # where processes wait for each other
    index, count = jax.process_index(), jax.process_count()
    _refuse_cpu_beside_tpus()
    if client.count > 1:
        number_processes(_hosts, index, count, config.initialization_timeout_s)
    task = "" if client.task == client.index else f" (task {client.task} of the coordination service)"
    print_to_stderr(
        f"lockstep: process {client.index} of {client.count}{task} on {socket.gethostname()}: backend "
        f"{jax.default_backend()}, {jax.local_device_count()} of {jax.device_count()} devices are local"
    )
    _hosts.phase("started")
    return _hosts


def current() -> Hosts:
    """Return the job's ``Hosts``: that of ``start``, else one over the service that the user has started, else one
    process.

    Where the user has started the service, this starts JAX's devices, which decide the number of this process.

    Raises:
        ConfigError: A launcher has started more processes than have joined the job.

    Example:
        >>> lockstep.hosts.current().count
        1
    """
    global _hosts
    hosts = current_without_devices()
    if hosts is not _hosts:
        check_launched(hosts.count)
        hosts.client.index = jax.process_index() if hosts.count > 1 else 0
        _hosts = hosts
    return _hosts


def current_without_devices() -> Hosts:
    """Return what `current` does, for the end of a process: no devices are started.

    Where they are not there yet, the process has the number that the coordination service gave it. What was found
    before the user started the service is looked up anew.
    """
    before_service = _hosts is not None and service_is_running() and isinstance(_hosts.client, MemoryClient)
    return Hosts(_client()) if _hosts is None or before_service else _hosts


class JobHosts:
    """The processes of the job as an object sees them that may be made before the job is joined: looked up at each use.

    Args:
        hosts: The processes, where the caller names them; None for those of the job.

    Example:
        >>> job_hosts = lockstep.hosts.JobHosts()  # before the job is joined
        >>> job_hosts().count
        1
    """

    def __init__(self, hosts: Hosts | None = None) -> None:
        self._hosts = hosts
        self._count: int | None = None  # the number of processes at the first use

    def __call__(self) -> Hosts:
        """Return the processes.

        Raises:
            HostError: Their number is not that of the first use.
            ConfigError: See `current`.
        """
        hosts = current() if self._hosts is None else self._hosts
        if self._count is None:
            self._count = hosts.count
        if self._count != hosts.count:
            raise HostError(
                f"this job had {self._count} process(es) at the first use of this object, and now has {hosts.count}: "
                "rounds of the two do not go together. Join the job first (lockstep.start() or "
                "jax.distributed.initialize()), and make a new object after it."
            )
        return hosts


def shutdown() -> None:
    """Leave the job in order: wait for every process, then end the service. Does nothing for a single process."""
    global _hosts, _stop_watching
    hosts, _hosts = _hosts, None
    stop_watching, _stop_watching = _stop_watching, None
    if hosts is not None and hosts.count > 1:
        hosts.phase("leaving")
        hosts.barrier("shutdown")
    if stop_watching is not None:
        stop_watching()
    if service_is_running():
        jax.distributed.shutdown()


def _refuse_cpu_beside_tpus() -> None:
    """Refuse to train on the CPU of a machine with TPUs, which JAX falls back to with a warning."""
    asked = (jax.config.jax_platforms or "").split(",")[0] == "cpu"
    if jax.default_backend() == "cpu" and not asked and (chips := tpu_chips()):
        raise ConfigError(
            f"this machine has {chips} TPU chips, but JAX {jax.__version__} runs on its CPU. Install the libtpu that "
            "belongs to this version (pip install 'jax-lockstep[tpu]'), and end other processes that use the chips. "
            "To run on the CPU on purpose, set JAX_PLATFORMS=cpu."
        )


def _watch(hosts: Hosts) -> Callable[[], None]:
    """Have this process end soon after another one fails, and the others soon after this one."""
    stop_watching, restore_hook = watch_peers(hosts), end_job_on_uncaught_errors(hosts)

    def stop() -> None:
        restore_hook()
        stop_watching()

    return stop


def _nothing() -> None:
    """Do nothing: a single process has no peers to stop watching."""


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
    count = config.num_processes if config.num_processes is not None else environment_integer(NUM_PROCESSES)
    index = config.process_id if config.process_id is not None else environment_integer(PROCESS_ID)
    settings = {"coordinator_address": address, "num_processes": count, "process_id": index}
    missing = [name for name, value in settings.items() if value is None]
    if len(missing) == 3:
        if not backend_is_running():
            _initialize_from_cluster(config)
        return
    if missing:
        raise ConfigError(
            f"distributed.{' and distributed.'.join(missing)} is not set, but {settings} is. Set all three (or the "
            f"variables {COORDINATOR_ADDRESS}, {NUM_PROCESSES}, {PROCESS_ID}), or none to ask the cluster."
        )
    assert address is not None and count is not None and index is not None
    if not 0 <= index < count:
        raise ConfigError(
            f"distributed.process_id is {index}; with {count} processes it must be 0 to {count - 1}. Give every "
            "process a number of its own."
        )
    check_count(config, count)  # before a wait that would end in a time-out
    if count == 1:
        return
    if backend_is_running():
        raise ConfigError(
            f"process {index} of {count} has used JAX before lockstep.hosts.start(), so it is too late to join the "
            "others. Call start() first (also before jax.devices())."
        )
    tls = tls_arguments(config.tls)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _keep_sigterm()
    with (
        _connecting(
            config, f"the {count} processes of the job (coordinator {address})", tls, address if index else None
        ),
        say_who_is_missing(address if index == 0 else None, count, config.initialization_timeout_s),
    ):
        jax.distributed.initialize(
            address,
            count,
            index,
            local_device_ids=local_gpus(index, count),
            cluster_detection_method="deactivate",
            coordinator_bind_address=bind_address(address) if index == 0 else None,
            initialization_timeout=config.initialization_timeout_s + ABORT_MARGIN_S,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
            **tls,
        )


def _keep_sigterm() -> None:
    """Keep JAX from catching SIGTERM: a loop that never asks its preemption service would not end on the signal.

    A program that wants the service calls ``jax.distributed.initialize`` first; its notices then end rounds of samples
    too.
    """
    jax.config.update("jax_enable_preemption_service", False)


def _initialize_from_cluster(config: DistributedConfig) -> None:
    """Start ``jax.distributed`` from what JAX finds of a TPU pod, GKE, Slurm or MPI; do nothing where it finds none."""
    tls = tls_arguments(config.tls)
    _keep_sigterm()
    try:
        with _connecting(config, "the processes of this cluster job", tls):
            address = cluster_address()
            count = required_count(config) or environment_integer(REQUIRE_PROCESS_COUNT)
            with say_who_is_missing(address, count, config.initialization_timeout_s):
                jax.distributed.initialize(
                    local_device_ids=local_gpus(),
                    coordinator_bind_address=None if address is None else bind_address(address),
                    initialization_timeout=config.initialization_timeout_s + ABORT_MARGIN_S,
                    heartbeat_timeout_seconds=config.heartbeat_timeout_s,
                    **tls,
                )
    except ValueError as error:
        # How JAX says that it found no cluster: this is a plain process.
        if "should be defined" not in str(error) and "must be defined" not in str(error):
            raise


@contextlib.contextmanager
def _connecting(config: DistributedConfig, whom: str, tls: TlsArguments, address: str | None = None) -> Iterator[None]:
    """End the process with our text when the block takes too long: the service would abort it without one.

    Args:
        address: host:port of the service where another process runs it, for a sentence about that one.
    """
    text = (
        f"not all of {whom} connected within {config.initialization_timeout_s} s. Was the command started on every "
        "worker (gcloud ... --worker=all, infra/launch.py), and can they reach the coordinator? Raise "
        "distributed.initialization_timeout_s if they only start slowly." + (TLS_ADVICE if tls else "")
    )

    def give_up() -> None:
        print_to_stderr(f"error: {text}{_about_coordinator(address)}")
        end_process(PEER_FAILED)  # another try may find them all

    timer = threading.Timer(config.initialization_timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise HostTimeoutError(f"{text} JAX says: {error}") from error
    finally:
        timer.cancel()


def _about_coordinator(address: str | None) -> str:
    """A sentence about a process with the service that does not answer; empty where it does."""
    try:
        if service_answers(address, ANSWER_S):
            return ""
    except ConnectionRefusedError:
        return f" Nobody listens at {address}: process 0 has not started, or has ended."
    return f" Process 0 does not answer at {address}: it is stopped, or its machine cannot be reached."


def number_processes(hosts: Hosts, index: int, count: int, timeout_s: float) -> None:
    """Have every process tell the others its number, and take the numbers over where all of them fit together.

    On a TPU the runtime numbers the processes by their place in the slice, and ``jax.distributed`` may have been given
    other numbers. Devices, W&B and Levanter follow the former, so the leader does too.

    Args:
        hosts: The processes, until now numbered as the tasks of the coordination service.

    Raises:
        HostError: On every process, with the same text: JAX's devices are those of another number of processes, or
            two processes have one number.
        HostTimeoutError: Not all processes came in time.
    """
    hosts.client.renumber(range(hosts.count))
    with hosts.scope("number the processes", timeout_s) as scope, scope.run_on_all("exchange") as told:
        told.share((index, count))
    processes = [index for index, _ in told.shared]
    if any(seen != hosts.count for _, seen in told.shared):
        seen_by: dict[int, list[int]] = {}
        for task, (_, seen) in enumerate(told.shared):
            seen_by.setdefault(seen, []).append(task)
        seen_text = "; ".join(f"{seen} by {name_processes(tasks)}" for seen, tasks in seen_by.items())
        raise _on_every_process(
            f"jax.distributed has connected {hosts.count} processes, but JAX sees devices of another number of "
            f"processes: {seen_text}. Such devices cannot run one program together. Give all processes the "
            "devices of one slice and the same JAX_PLATFORMS, or start each job with a coordinator of its own."
        )
    twice = [process for process, times in Counter(processes).items() if times > 1]
    if twice or sorted(processes) != list(range(hosts.count)):
        raise _on_every_process(
            f"jax.process_index() is {processes} on the processes 0 to {hosts.count - 1} of the coordination service; "
            "it must be another number from 0 on each. A runtime that shows all devices to every process (Pathways) "
            "works with one process only: start one, without jax.distributed."
        )
    hosts.client.renumber(processes)


def _on_every_process(text: str) -> HostError:
    error = HostError(text)
    error.on_every_process = True
    return error
