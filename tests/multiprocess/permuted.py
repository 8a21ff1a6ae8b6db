"""Processes whose number differs from the one that they gave to ``jax.distributed``, as on a TPU.

There ``jax.process_index()`` comes from the slice. On CPU it is the node's number that JAX gives to its CPU client;
a process that has called `permute` gives another one. The names of JAX's used here are private, so this is for tests
alone.

python -m tests.multiprocess.permuted 2,0,1 MODULE [ARGUMENT ...]     runs a module in such a process
"""

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

VARIABLE = "LOCKSTEP_TEST_PROCESSES"
"""The process of each task, ``2,0,1``, for processes that tests/multiprocess/worker.py runs in."""


def permute(processes: Sequence[int]) -> None:
    """Make ``processes[task]`` the number of this process, before JAX starts its devices."""
    from jax._src import xla_bridge

    make = xla_bridge.xla_client.make_cpu_client

    def make_permuted(**values: Any) -> Any:
        return make(**{**values, "node_id": processes[values["node_id"]]})

    assert not xla_bridge.backends_are_initialized()
    xla_bridge.xla_client.make_cpu_client = make_permuted


def numbers(text: str) -> list[int]:
    """``2,0,1`` as a list."""
    return [int(number) for number in text.split(",")]


def permute_as_told() -> None:
    """`permute` where the environment says so."""
    if order := os.environ.get(VARIABLE):
        permute(numbers(order))


if __name__ == "__main__":
    order, module, *sys.argv[1:] = sys.argv[1:]
    permute(numbers(order))
    runpy.run_module(module, run_name="__main__")
