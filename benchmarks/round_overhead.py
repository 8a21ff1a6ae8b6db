"""What a round of samples costs outside prefill and decode: barriers, agreement, exchanges, the table.

    python -m benchmarks.round_overhead [--json PATH]

Rounds of a tiny model on 2 and 4 real processes, and the host protocol alone (`run_round` without devices) between 2 to
64 clients in memory, where every call to the service sleeps as long as one took on the real service.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.sizes import sized
from benchmarks.workers import report, run_on_threads, run_workers, write_json

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, WARM = sized(12, 4), 2
PROCESSES, SIMULATED = sized((2, 4), (2,)), sized((2, 4, 8, 16, 32, 64), (2, 4))
GOAL_MS = 50.0


def main() -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from lockstep.hosts import run_main

        run_main(worker)
        return 0
    began, rows = time.monotonic(), {}
    for processes in PROCESSES:
        found = on_processes(processes)
        rows |= {f"{processes}_processes_{name}": value for name, value in found.items()}
        print(f"{processes} processes: {json.dumps(found)}", flush=True)
    latency_ms = rows["2_processes_call_ms"]
    for count in SIMULATED:
        found = in_memory(count, latency_ms / 1000)
        rows |= {f"protocol_{count}_clients_{name}": value for name, value in found.items()}
        print(f"{count} clients in memory: {json.dumps(found)}", flush=True)
    least, most = SIMULATED[0], SIMULATED[-1]
    growth, linear = rows[f"protocol_{most}_clients_ms"] / rows[f"protocol_{least}_clients_ms"], most / least
    rows |= {"goal_2_processes_ms": GOAL_MS}
    rows |= {f"protocol_growth_{least}_to_{most}": growth, f"linear_growth_{least}_to_{most}": linear}
    print(f"{most} clients take {growth:.1f} times as long as {least}; linear would be {linear:g} times")
    print(f"measured in {time.monotonic() - began:.0f} s")
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def on_processes(processes: int) -> dict[str, float]:
    """Median milliseconds of a round on real processes, as the leader sees it."""
    figures: dict[str, float]
    (figures,) = run_workers("benchmarks.round_overhead", "--worker", processes=processes, devices=1)
    return figures


def worker() -> None:
    """One process: rounds of the callback, timed whole and inside launches."""
    from lockstep import InferenceEvalConfig, SampleCallback, start
    from lockstep.engine import Gate
    from tests import tiny

    hosts = start()
    trainer = tiny.make_trainer("auto", 1, hosts)
    model = tiny.init_model(trainer)
    config = InferenceEvalConfig(eval_every=1, prompts=["one", "two"], max_new_tokens=16, on_error="raise")
    callback = SampleCallback(config, tiny.tokenizer(), hosts=hosts)
    inside = 0.0
    launch = Gate.launch

    @contextlib.contextmanager
    def timed(self: Gate, program: str) -> Iterator[None]:
        nonlocal inside
        with launch(self, program):
            begin = time.perf_counter()
            yield
            inside += time.perf_counter() - begin

    counted, laps, calls = CallCounter(), [], []
    with counted.watch(type(hosts.client)), mock.patch.object(Gate, "launch", timed):
        for step in range(ROUNDS):
            hosts.barrier("between rounds")
            counted.reset()
            inside, begin = 0.0, time.perf_counter()
            with contextlib.redirect_stdout(sys.stderr):
                callback(SimpleNamespace(step=step + 1, model=model))
                total = time.perf_counter() - begin
                callback.flush()
            laps.append((total, inside, counted.calls))
            for _ in range(5):
                begin = time.perf_counter()
                hosts.client.set(f"lockstep/benchmark/{hosts.index}", b"x")
                calls.append(time.perf_counter() - begin)
    laps = laps[WARM:]
    figures = {
        "outside_ms": 1000 * statistics.median(total - inside for total, inside, _ in laps),
        "inside_ms": 1000 * statistics.median(inside for _, inside, _ in laps),
        "call_ms": 1000 * statistics.median(calls),
        "leaders_calls": statistics.median(count for *_, count in laps),
    }
    hosts.barrier("all have measured")
    if hosts.is_leader:
        report(figures)


CALLS = ("set", "get", "peek", "get_dir", "delete", "barrier")
"""What can be asked of the service; each is one request."""


class CallCounter:
    """Counts the requests to the service that the thread which made this counter waits for."""

    def __init__(self) -> None:
        self.calls = 0
        self._thread = threading.get_ident()

    def reset(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += threading.get_ident() == self._thread

    @contextlib.contextmanager
    def watch(self, client: type) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(client, name, self._counted(getattr(client, name))))
            yield

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count()
            return call(*args)

        return counted


class SlowClient:
    """A client in memory, each of whose calls takes as long as one to the real service."""

    def __init__(self, client: Any, latency_s: float) -> None:
        self._client, self._latency_s = client, latency_s
        self.index, self.count = client.index, client.count
        self.counted = CallCounter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in CALLS:
            return call

        def slow(*args: Any) -> Any:
            self.counted.count()
            time.sleep(self._latency_s)
            return call(*args)

        return slow


def in_memory(count: int, latency_s: float) -> dict[str, float]:
    """Median milliseconds of the host protocol of a round between ``count`` threads, and calls of one of them."""
    import jax

    from lockstep.callback.round import RoundPrompts, run_round
    from lockstep.engine import Session
    from lockstep.hosts import Hosts, Ledger, MemoryClient
    from lockstep.placement import make_mesh
    from lockstep.types import Request, SamplingParams
    from tests import tiny

    model = (tiny.CONFIG, tiny.placed_weights(make_mesh("auto")))
    requests = [Request(prompt_id=0, prompt_tokens=(1,), params=SamplingParams(max_new_tokens=1))]

    class NoEngine:
        """Launches nothing; the gate is passed twice, as in a short round."""

        def __init__(self) -> None:
            self.ledger = Ledger()

        def free_bytes(self, model: Any) -> int:
            return 0

        def check(self, model: Any, requests: Any) -> None: ...

        def prepare(self, model: Any, requests: Any, *, free: int) -> dict[str, str]:
            return {"decode": "x"}

        def stream(self, model: Any, requests: Any, *, gate: Any, **_: Any) -> Any:
            for _ in range(2):
                gate(None)
            yield []

    def rounds(client: Any) -> list[tuple[float, int]]:
        slow = SlowClient(client, latency_s)
        hosts, engine, laps = Hosts(slow), NoEngine(), []
        stop_heart = hosts.start_heartbeat()
        for step in range(ROUNDS):
            hosts.barrier("between rounds")
            slow.counted.reset()
            begin = time.perf_counter()
            with hosts.scope("round") as scope:
                run_round(
                    scope,
                    Session(engine),
                    model,
                    facts={"step": str(step)},
                    read=lambda limits: RoundPrompts(requests=requests),
                )
            laps.append((time.perf_counter() - begin, slow.counted.calls))
        stop_heart()
        return laps[WARM:]

    # The threads stand for processes, each of which would have a guard of its own.
    with mock.patch.object(jax, "thread_guard", lambda _: contextlib.nullcontext()):
        laps = run_on_threads(rounds, MemoryClient.hub(count))
    leader, follower = laps[0], laps[1]
    return {
        "ms": 1000 * statistics.median(seconds for seconds, _ in leader),
        "leaders_calls": statistics.median(calls for _, calls in leader),
        "calls": statistics.median(calls for _, calls in follower),
    }


if __name__ == "__main__":
    sys.exit(main())
