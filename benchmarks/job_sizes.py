"""The cost of the protocol between hosts by size of the job: real clients of the coordination service, and one host.

    python -m benchmarks.job_sizes 8 64 256 1024 2048 [--json PATH]

Exchanges are between so many real clients of JAX's coordination service, the threads of `CLIENT_PROCESSES` processes on
this machine. All come at a time agreed on before; a figure is the median of seconds from then until the last client is
through. ``phase`` has 2.3 KB to agree on and a number of each client's own, ``agree`` the former alone, ``barrier`` is
the service's own, ``requests`` the three requests that an exchange makes, called directly; ``save`` and ``load`` are
the exchanges of a checkpoint (`Checkpointer`), ``connect`` is the connections of all, once. The CPU seconds of an
exchange, of all clients and of the service, are there because a pod has a host for each client.

The rest is what each process of such a job does by itself, in CPU time: ``first_batch``, the first batch of so many
replicas with 64 full slots each; ``launch``, between two launches of theirs; ``share``, who writes which part of the
state of Llama-3-8B, with FSDP over 256 of four devices a host, and ``busiest`` how much the busiest writes.
"""

import argparse
import dataclasses
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import haliax as hax
import jax
import numpy as np

from benchmarks.host_cost import STEPS, first_batch, measure, requests_of, show, with_replicas
from benchmarks.sizes import sized
from benchmarks.workers import report, run_on_threads, run_workers
from lockstep.models import LlamaConfig, LlamaLMHeadModel
from lockstep.training import OptimizerConfig, busiest_bytes, parse_precision, state_structs

GOALS = {f"clients_{count}_{kind}_s": goal for count, goal in ((256, 0.1), (1024, 0.3)) for kind in ("phase", "agree")}
CLIENT_PROCESSES, CONNECT_S, IMPORT_S, GAP_S = sized(4, 2), sized(8.0, 1.0), sized(30, 10), sized(2.0, 0.1)
CLIENT_ROUNDS, AGREED = sized(5, 1), {f"value {number}": "x" * 64 for number in range(28)}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device that arrays can be planned for."""

    id: int
    process_index: int
    platform: str = "none"
    device_kind: str = "none"


def on_each_host(count: int) -> dict[str, float]:
    """Milliseconds that every process of a job of so many hosts needs, by itself."""
    steps = [first_batch(count)[f"first_batch_{count}_ms"] for _ in range(3)]
    launch = measure(with_replicas(count, 1 + 3 * STEPS), requests_of(64 * count, (1, 1), (3 * STEPS, 3 * STEPS)))
    chips = np.array([Chip(number, number // 4) for number in range(4 * count)], dtype=object)
    mesh = jax.sharding.Mesh(chips.reshape(-1, math.gcd(256, 4 * count), 1), ("dp", "fsdp", "tp"))
    llama = {"hidden_dim": 4096, "intermediate_dim": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8}
    vocab, model = hax.Axis("vocab", 128256), LlamaConfig(max_seq_len=4096, **llama)
    state, _ = state_structs(
        lambda key: LlamaLMHeadModel.init(vocab, model, key=key),
        OptimizerConfig().build(8),
        mesh,
        parse_precision("f32"),
    )
    begin = time.thread_time()
    largest = busiest_bytes(jax.tree.leaves(state))
    return {
        f"hosts_{count}_first_batch_ms": statistics.median(steps),
        f"hosts_{count}_launch_ms": launch["ms_per_launch"],
        f"hosts_{count}_share_ms": 1e3 * (time.thread_time() - begin),
        f"hosts_{count}_busiest_mib": largest / 2**20,
    }


def between_clients(count: int) -> dict[str, float]:
    """Seconds of exchanges between so many real clients of the coordination service."""
    from jaxlib import _jax

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=3600)
    start = time.monotonic() + IMPORT_S + count / 32  # all are connected by then
    words = ["--client", address, str(count), str(start)]
    begin = time.process_time()
    found = run_workers("benchmarks.job_sizes", *words, processes=processes_of(count), devices=1)
    kinds = list(found[0]["laps"])
    figures: dict[str, float] = {"service_cpu_s": (time.process_time() - begin) / (len(kinds) * CLIENT_ROUNDS)}
    figures["connect_s"] = max(one["connect"] for one in found)
    for kind in kinds:
        laps = [max(each) for each in zip(*(one["laps"][kind] for one in found), strict=True)]
        figures[f"{kind}_s"] = statistics.median(laps)
        figures[f"{kind}_cpu_s"] = sum(one["cpu"][kind] for one in found)
    del service
    return {f"clients_{count}_{name}": value for name, value in figures.items()}


def processes_of(count: int) -> int:
    """The number of processes that so many clients share."""
    return min(CLIENT_PROCESSES, count)


def clients(address: str, count: int, start: float) -> int:
    """One process of `between_clients`."""
    from jaxlib import _jax

    from lockstep.hosts import Hosts, JaxClient

    place, processes = int(os.environ["LOCKSTEP_PROCESS_ID"]), processes_of(count)
    tasks = range(count * place // processes, count * (place + 1) // processes)
    kinds = ("phase", "agree", "save", "load", "requests", "barrier")
    laps: dict[str, list[float]] = {kind: [0.0] * CLIENT_ROUNDS for kind in kinds}
    cpu = dict.fromkeys(laps, 0.0)
    lock, gap_s = threading.Lock(), GAP_S + count / 512
    sys.setswitchinterval(1.0)  # on a pod a client has an interpreter of its own

    def run(task: int) -> None:
        service = _jax.get_distributed_runtime_client(
            address, task, init_timeout=120, shutdown_on_destruction=False, heartbeat_timeout=3600
        )
        time.sleep(max(0.0, start - CONNECT_S - count / 64 - time.monotonic()))
        service.connect()
        connected[task] = time.monotonic() - (start - CONNECT_S - count / 64)
        hosts = Hosts(JaxClient(service, task, count), timeout_s=120)
        hosts._channel.heartbeat._has_thread = True  # as in a job, where another thread posts it

        def phase() -> None:
            with hosts.scope("round") as scope, scope.run_on_all("prepare") as prepared:
                prepared.agree(AGREED)
                prepared.share(1000 * task)
            assert len(prepared.shared) == count

        def save() -> None:
            for name in ("beginning a checkpoint", "ending a checkpoint"):
                with hosts.scope("checkpoint") as scope, scope.run_on_all(name) as phase:
                    if scope.is_leader:
                        phase.share("arrays")

        def load() -> None:
            hosts.broadcast_from_leader("finding the checkpoint", lambda: b"x" * 4096)
            for name in ("sharing the directory", "reading the checkpoint"):
                with hosts.run_on_all(name):
                    pass

        def requests() -> None:
            laps_done.append(f"requests/{len(laps_done)}")
            service.key_value_set_bytes(f"{laps_done[-1]}/{task}", b"x" * 64)
            service.wait_at_barrier(laps_done[-1], 60_000)
            if task == 0:
                service.key_value_set_bytes(f"{laps_done[-1]}/all", b"x" * 64)
            else:
                service.blocking_key_value_get_bytes(f"{laps_done[-1]}/all", 60_000)

        laps_done: list[str] = []
        calls: dict[str, Callable[[], object]] = {
            "phase": phase,
            "agree": lambda: hosts.agree("values", AGREED),
            "save": save,
            "load": load,
            "requests": requests,
            "barrier": lambda: service.wait_at_barrier("floor", 60_000),
        }
        for number in range(len(calls) * CLIENT_ROUNDS):
            kind, at = list(calls)[number // CLIENT_ROUNDS], start + number * gap_s
            time.sleep(max(0.0, at - time.monotonic()))
            begin = time.process_time()
            calls[kind]()
            seconds = time.monotonic() - at
            with lock:
                lap = number % CLIENT_ROUNDS
                laps[kind][lap] = max(laps[kind][lap], seconds)
            if task == tasks[0]:
                time.sleep(gap_s / 2)
                cpu[kind] += (time.process_time() - begin) / CLIENT_ROUNDS
        hosts.barrier("end")
        kept.append(service)

    kept: list[object] = []
    connected: dict[int, float] = {}
    run_on_threads(run, tasks)
    report({"laps": laps, "cpu": cpu, "connect": max(connected.values())})
    os._exit(0)  # the clients would each wait for the others


def main() -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", help="the numbers of hosts")
    parser.add_argument("--json", type=Path, help="write one key per row to this file")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        address, count, start = arguments.client
        return clients(address, int(count), float(start))
    if not arguments.counts or min(arguments.counts) < 1:
        parser.error(f"the numbers of hosts are {arguments.counts}. Give some, each at least 1, such as 8 64.")
    rows: dict[str, float] = {}
    for count in arguments.counts:
        rows |= on_each_host(count) | between_clients(count)
    show(rows, GOALS, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
