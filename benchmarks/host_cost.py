"""What the host does between launches of 1,024 slots × 64 steps, with a stub in place of the devices.

    python -m benchmarks.host_cost [--json PATH]

The engine's own loop runs: scheduler, packing, placing on 8 CPU devices, unpacking. The stub answers with random
tokens; its time is subtracted. ``steady``: every slot decodes to its end, 32 launches. ``mixed``: four times as many
prompts as slots, prompts of 16 to 256 tokens, answers of up to 64 to 512, one token in 500 ends its answer.
``us_per_token_256``: ``steady`` on 256 replicas of 64 slots, 8 launches.

``ms_per_launch`` is the median time on the critical path from the end of a launch to the next one, and ``us_per_token``
the sum of these times over the number of tokens. What is done before the launches of a prefill counts. What is done
while the devices work (`Scheduler.work_ahead`: completions, reading requests) does not; with the completions of the
last launch it is ``us_per_token_beside``. Times are CPU seconds of the thread, so that other programs on the machine
count as little as possible.

``gate_ms``: the gate before each launch (`lockstep.engine.Gate`) between 8 processes on this machine, median wall time;
in turn with it ``floor_ms``, a barrier of the coordination service called directly, the one request that a gate makes;
``exchange_ms``, the exchange in which all post and read. ``gate_vs_barrier`` is the gate over its floor.
``paced_gate_ms`` and ``paced_floor_ms``: the same after 150 ms of sleep in place of a launch, as in a run, where what
else a process sends then (its heartbeat) gets in the way. The hosts of a pod have cores of their own, which this
machine has for two processes at most: the names that end in ``_2`` are between two. ``gate_cpu_ms`` is the CPU time
of a gate in the busiest of 8 processes, all threads, the coordination service among them.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from benchmarks.sizes import sized
from benchmarks.workers import report, run_workers, write_json
from lockstep.engine import Gate
from lockstep.engine.launches import Devices, launch_all
from lockstep.engine.schedule import Capacity, DecodeBatch, DecodeResults, Scheduler
from lockstep.placement import make_decode_mesh, make_mesh
from lockstep.types import Request, SamplingParams

GOALS = {
    "us_per_token": 0.1,
    "us_per_token_256": 0.1,
    "ms_per_launch": 3.0,
    "gate_ms": 1.5,
    "first_batch_256_ms": 50.0,
}
LAUNCH_S = sized(0.15, 0.01)
"""Seconds of a launch, of which the gate may cost a hundredth."""
PROCESSES, GATES = sized(8, 2), sized(400, 10)
REPLICAS, SLOTS, STEPS, PAGE, STOP, VOCAB = 8, sized(1024, 64), 64, 64, 499, 500


class Fetched:
    """An array that was computed, as `device.start_fetch` sees it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def addressable_data(self, _: int) -> "Fetched":
        return self

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self._array


class StubPrograms:
    """Programs that compute nothing: random tokens until a slot has all of its own, or its stop token."""

    copy_pages = prompt_logprobs = None

    def __init__(self, capacity: Capacity) -> None:
        self.total = self._untaken = 0.0
        self._rng = np.random.default_rng(0)
        markers = DecodeBatch.empty(capacity, -7)
        markers.remaining[:], markers.stop_ids[:] = -8, -9
        row = markers.packed()[0]
        self._num_steps, self._remaining, self._stop_ids = (np.flatnonzero(row == mark) for mark in (-7, -8, -9))

    def prefill(self, weights: Any, pool: Any, given: Any) -> tuple[Any, None]:
        return pool, None

    def decode(self, weights: Any, pool: Any, given: Any) -> tuple[Any, Fetched]:
        begin = time.thread_time()
        packed = np.asarray(given)
        steps = int(packed[0, self._num_steps[0]])
        remaining, stops = packed[:, self._remaining], packed[:, self._stop_ids]
        tokens = self._rng.integers(0, VOCAB, (*remaining.shape, STEPS), np.int32)
        stopped = np.cumsum(tokens == stops[..., None], axis=-1) - (tokens == stops[..., None]) > 0
        over = np.arange(STEPS) >= np.minimum(remaining, steps)[..., None]
        tokens[stopped | over] = -1
        logprobs = self._rng.random(tokens.shape, np.float32)
        results = Fetched(DecodeResults.of(tokens, logprobs, logprobs).packed)
        self._untaken += time.thread_time() - begin
        return pool, results

    def take(self) -> float:
        """The seconds of the stub since the last call."""
        seconds, self._untaken = self._untaken, 0.0
        self.total += seconds
        return seconds


class Clock(Gate):
    """Split the host's time: between launches, in the stub, and while the devices would work."""

    def __init__(self, stub: StubPrograms, scheduler: Scheduler) -> None:
        super().__init__()
        self.between: list[float] = []
        """The seconds on the critical path from one decode launch to the next."""
        self._stub, self._ahead = stub, 0.0
        self._last = time.thread_time()
        self._work_ahead = scheduler.work_ahead
        scheduler.work_ahead = self._timed  # type: ignore[method-assign]

    def _timed(self) -> None:
        begin = time.thread_time()
        self._work_ahead()
        self._ahead += time.thread_time() - begin

    @contextlib.contextmanager
    def launch(self, program: str) -> Iterator[None]:
        yield
        if program == "decode":
            now = time.thread_time()
            self.between.append(now - self._last - self._stub.take() - self._ahead)
            self._last, self._ahead = now, 0.0


def measure(capacity: Capacity, requests: list[Request]) -> dict[str, float]:
    """The host's time on some requests: per launch and per token."""
    scheduler, stub = Scheduler(capacity, requests), StubPrograms(capacity)
    devices = jax.devices()[: math.gcd(capacity.replicas, jax.device_count())]  # each has as many replicas
    mesh, pool = make_decode_mesh(make_mesh("auto", devices), 1), SimpleNamespace(delete=lambda: None)
    clock = Clock(stub, scheduler)
    begin = time.thread_time()
    devices_of_stub = Devices(stub, None, pool, mesh)  # type: ignore[arg-type]
    for _ in launch_all(devices_of_stub, scheduler, clock):
        pass
    completions = scheduler.completions()
    seconds = time.thread_time() - begin - stub.total
    tokens = sum(len(completion.tokens) for completion in completions)
    return {
        "us_per_token": 1e6 * sum(clock.between) / tokens,
        "us_per_token_beside": 1e6 * (seconds - sum(clock.between)) / tokens,
        "ms_per_launch": 1e3 * statistics.median(clock.between),
        "ms_per_launch_mean": 1e3 * statistics.mean(clock.between),
        "launches": len(clock.between),
        "tokens": tokens,
    }


def requests_of(count: int, prompt: tuple[int, int], new: tuple[int, int], **options: Any) -> list[Request]:
    """Random prompts, their lengths and those of their answers between two numbers each."""
    rng = np.random.default_rng(0)
    return [
        Request(
            prompt_id=number,
            prompt_tokens=tuple(rng.integers(0, VOCAB, rng.integers(*prompt, endpoint=True)).tolist()),
            params=SamplingParams(max_new_tokens=int(rng.integers(*new, endpoint=True)), **options),
        )
        for number in range(count)
    ]


def capacity_of(tokens: int) -> Capacity:
    """Room for every slot to have so many tokens."""
    pages = -(-tokens // PAGE)
    return Capacity(
        replicas=REPLICAS,
        sequences=SLOTS,
        slots=SLOTS // REPLICAS,
        page_size=PAGE,
        pages=1 + SLOTS // REPLICAS * pages,
        pages_per_sequence=pages,
        prefill_rows=8,
        steps=STEPS,
        stop_ids=1,
    )


def with_replicas(replicas: int, tokens: int) -> Capacity:
    """So many replicas with 64 slots each, and room for every slot to have so many tokens."""
    capacity = dataclasses.replace(capacity_of(tokens), replicas=replicas, sequences=64 * replicas, slots=64)
    return dataclasses.replace(capacity, pages=1 + 64 * capacity.pages_per_sequence)


def first_batch(replicas: int) -> dict[str, float]:
    """Milliseconds until the first batch of a full job of so many replicas with 64 slots each is there."""
    capacity = with_replicas(replicas, 768)
    scheduler = Scheduler(capacity, requests_of(64 * replicas, (100, 100), (512, 512)))
    begin = time.thread_time()
    scheduler.next_batch()
    return {f"first_batch_{replicas}_ms": 1e3 * (time.thread_time() - begin)}


def between_processes(processes: int) -> dict[str, float]:
    """Milliseconds that a gate, its floor and an exchange take between processes that all come at once."""
    (found,) = run_workers("benchmarks.host_cost", "--worker", processes=processes, devices=1)
    return {"processes": processes, **found}


def worker() -> int:
    """One process of `between_processes`."""
    from lockstep.hosts import run_main, start
    from lockstep.hosts._client import JaxClient

    def run() -> None:
        hosts = start()
        gate = Gate(hosts, 1e9)
        assert isinstance(hosts.client, JaxClient)
        service = hosts.client._client
        calls: dict[str, tuple[int, float, Callable[[], object]]] = {
            "gate_ms": (GATES, 0.0, lambda: gate(None)),
            "floor_ms": (GATES, 0.0, lambda: service.wait_at_barrier("floor", 60_000)),
            "exchange_ms": (GATES, 0.0, lambda: hosts.agree("exchange", {"launch": "1"})),
            "paced_gate_ms": (GATES // 5, LAUNCH_S, lambda: gate(None)),
            "paced_floor_ms": (GATES // 5, LAUNCH_S, lambda: service.wait_at_barrier("paced floor", 60_000)),
        }
        laps: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(max(times for times, *_ in calls.values())):
            for name, (times, pause_s, call) in calls.items():
                if turn < times:
                    hosts.barrier("clear")  # it deletes the exchange's keys, which no gate between launches has to
                    hosts.client.barrier("ready", 60.0)
                    time.sleep(pause_s)
                    begin = time.perf_counter()
                    call()
                    laps[name].append(1e3 * (time.perf_counter() - begin))
        hosts.barrier("gates alone")
        begin = time.process_time()
        for _ in range(GATES):
            gate(None)
        cpu = 1e3 * (time.process_time() - begin) / GATES
        all_cpu = hosts.gather("CPU time", repr(cpu).encode())
        if all_cpu is not None:
            medians = {name: statistics.median(each) for name, each in laps.items()}
            medians |= {"gate_vs_barrier": medians["gate_ms"] / medians["floor_ms"]}
            report(medians | {"gate_cpu_ms": max(map(float, all_cpu))})

    run_main(run)
    return 0


def main() -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write one key per row to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker()
    steady = measure(capacity_of(1 + 32 * STEPS), requests_of(SLOTS, (1, 1), (32 * STEPS, 32 * STEPS)))
    mixed = measure(capacity_of(768), requests_of(4 * SLOTS, (16, 256), (64, 512), stop_token_ids=(STOP,)))
    replicas = sized(256, 8)
    many = measure(with_replicas(replicas, 1 + 8 * STEPS), requests_of(64 * replicas, (1, 1), (8 * STEPS, 8 * STEPS)))
    rows = {
        **steady,
        "us_per_token_256": many["us_per_token"],
        **between_processes(PROCESSES),
        **{f"{name}_2": value for name, value in between_processes(2).items() if name.endswith("_ms")},
        **{f"mixed_{name}": value for name, value in mixed.items()},
        **{name: value for count in (8, 64, 256) for name, value in first_batch(count).items()},
    }
    show(rows, GOALS, arguments.json)
    return 0


def show(rows: Mapping[str, float], goals: Mapping[str, float], json: Path | None) -> None:
    """Print the figures, and write the JSON where it is asked for."""
    for name, value in rows.items():
        goal = f"  (goal: at most {goals[name]})" if name in goals else ""
        print(f"{name:28} {value:14,.3f}{goal}")
    if json:
        write_json(json, rows)


if __name__ == "__main__":
    sys.exit(main())
