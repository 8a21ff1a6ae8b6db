"""Timing device programs on all hosts: compiled and agreed on first, then launched in the same order everywhere."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.hosts import Hosts, Watchdog, environment
from lockstep.placement import place
from lockstep.placement.device import Program

REPEATS: Final = 3
"""Times that each number of turns is launched; the fastest counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A program that does the same some number of times, and another that makes its arguments.

    Args:
        name: The name of what is timed.
        fill: The program that makes the arguments, without arguments of its own.
        run: The program that takes them and a number of turns, and returns what has their result in it.
        turns: The smaller and the larger number of turns; the difference of their seconds is that of the turns between
            them, without what a launch costs.
    """

    name: str
    fill: Program
    run: Program
    turns: tuple[int, int]


def time_loops(hosts: Hosts, name: str, build: Callable[[], Sequence[Loop]]) -> list[list[float]]:
    """Time some loops; every process makes the same call.

    Args:
        hosts: The processes of the job.
        name: The name of the measurement.
        build: Compiles the loops; launches nothing.

    Returns:
        For each process, the seconds of one turn of each loop.

    Raises:
        PeerError: A loop does not compile or run on some host.
        DisagreementError: The hosts compiled different programs.
        LaunchMismatchError: The hosts launched different programs.
    """
    watchdog = Watchdog(hosts, hosts.timeout_s)
    with hosts.scope(f"doctor/{name}") as scope:
        with scope.run_on_all("compile") as compiled:
            compiled.agree(environment())
            loops = build()
            for loop in loops:
                compiled.agree({**loop.fill.digests, **loop.run.digests})
        with scope.launch_on_all("measure") as measured, watchdog.watch(name):
            measured.share([_time(loop) for loop in loops])
    return measured.shared


def _time(loop: Loop) -> float:
    """Seconds of one turn on this process."""
    arguments = jax.block_until_ready(loop.fill())
    few, many = loop.turns
    _launch(loop, arguments, few)  # the first launch of a program does more
    fastest = {turns: min(_launch(loop, arguments, turns) for _ in range(REPEATS)) for turns in loop.turns}
    slope = (fastest[many] - fastest[few]) / (many - few)
    # Where the turns are lost in the noise of the launch, they take less than the launch together with them.
    return slope if slope > 0 else fastest[many] / many


def _launch(loop: Loop, arguments: Any, turns: int) -> float:
    (leaf, *_) = jax.tree.leaves(arguments)
    count = place(np.array(turns, np.int32), NamedSharding(leaf.sharding.mesh, PartitionSpec()))
    begin = time.perf_counter()
    jax.block_until_ready(loop.run(arguments, count))
    return time.perf_counter() - begin
