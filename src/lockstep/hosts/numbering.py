"""One number per process: that of ``jax.process_index()``, whatever number the coordination service gave it.

On a TPU the runtime numbers the processes by their place in the slice, and ``jax.distributed`` may have been given
other numbers. Devices, W&B and Levanter follow the former, so the leader does too.
"""

from collections import Counter

from lockstep.errors import HostError
from lockstep.hosts.exchange import name_processes
from lockstep.hosts.hosts import Hosts


def number_processes(hosts: Hosts, index: int, count: int, timeout_s: float) -> None:
    """Have every process tell the others its number, and take the numbers over where all of them fit together.

    Args:
        hosts: The processes, until now numbered as the tasks of the coordination service.
        index: The number of this process, ``jax.process_index()``.
        count: The number of processes that JAX sees, ``jax.process_count()``.
        timeout_s: The seconds to wait for the other processes.

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
