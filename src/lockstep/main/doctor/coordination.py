"""How long the coordination service takes: a barrier, and an exchange of a phase."""

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from lockstep.hosts import Hosts
from lockstep.main.doctor.finding import Finding
from lockstep.printable import seconds_text

ROUNDS: Final = 20
"""Times that each is done; the median counts."""
SLOW_S: Final = 0.05
"""Seconds of a barrier above which there is a warning: decoding makes one before each launch."""


def measure_coordination(hosts: Hosts) -> dict[str, float]:
    """Measure this process's median seconds of a barrier and of an exchange; every process makes the same call.

    Args:
        hosts: The processes of the job.
    """
    barriers, exchanges = [], []
    for number in range(ROUNDS):
        with hosts.scope(f"doctor/latency/{number}") as scope:
            begin = time.perf_counter()
            scope.barrier("barrier")
            middle = time.perf_counter()
            with scope.run_on_all("exchange"):
                pass
            barriers.append(middle - begin)
            exchanges.append(time.perf_counter() - middle)
    return {"barrier_s": statistics.median(barriers), "exchange_s": statistics.median(exchanges)}


def judge_coordination(by_process: Sequence[dict[str, Any]]) -> Finding:
    """Say how long the slowest process waits.

    Args:
        by_process: What `measure_coordination` returned on each process.
    """
    if len(by_process) == 1:
        return Finding.ok("coordination", "one process: nothing to wait for")
    barrier, exchange = (max(one[name] for one in by_process) for name in ("barrier_s", "exchange_s"))
    text = f"a barrier takes {seconds_text(barrier)}, an exchange {seconds_text(exchange)} (median of {ROUNDS})"
    if barrier > SLOW_S:
        fix = "Look for a busy process 0, which serves all others, or for a slow network between hosts."
        return Finding.warning("coordination", f"{text}.", fix)
    return Finding.ok("coordination", text)
