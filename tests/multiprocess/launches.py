"""Sees every launch of a device program in this process: jitted, compiled ahead of time, eager, other libraries'.

CPU with gloo forgives a launch that only one host makes; a TPU pod does not. So tests compare what each host launched.
The names of JAX's used here are private ones, so this is for tests alone.
"""

import contextlib
import json
from collections.abc import Iterator
from unittest import mock

from lockstep.hosts import Hosts


@contextlib.contextmanager
def record_launches() -> Iterator[list[str]]:
    """The names of all launches inside, in order, each with its number of local devices where that is more than one."""
    from jax._src import pjit, stages
    from jax._src.interpreters import pxla

    launches: list[str] = []
    call = pxla.ExecuteReplicated.__call__

    def recorded(self, *args):
        result = call(self, *args)  # raises where launches are refused: that was none
        count = len(self._local_devices)
        launches.append(self.name if count == 1 else f"{self.name} on {count} local devices")
        return result

    def slow_call(self, *args, **kwargs):
        # Without the C++ dispatcher, which a program compiled ahead of time keeps from its first call on.
        return stages.Compiled.call(self._params, *args, **kwargs)[0]

    # What was called before must come through Python again.
    for cache in (pjit._cpp_pjit_cache_fun_only, pjit._cpp_pjit_cache_explicit_attributes):
        cache.clear()
    with (
        mock.patch.object(pjit, "_get_fastpath_data", lambda *a, **k: None),
        mock.patch.object(stages.Compiled, "__call__", slow_call),
        mock.patch.object(pxla.ExecuteReplicated, "__call__", recorded),
    ):
        yield launches


@contextlib.contextmanager
def assert_same_launches(hosts: Hosts) -> Iterator[list[str]]:
    """Fails on every process if one of them launches anything inside, eager operations too, that another does not.

    Raises:
        AssertionError: names the first launch that differs, and what each process launched there.
    """
    with record_launches() as launches:
        yield launches
    with hosts.scope("assert_same_launches") as scope:
        rows = scope.gather("launches", json.dumps(launches).encode())
        held = json.loads(scope.broadcast("all", b"[" + b",".join(rows) + b"]" if rows is not None else None))
        scope.barrier("end")
    for index in range(max(map(len, held))):
        made = [one[index] if index < len(one) else "nothing" for one in held]
        texts = [f"process {process}: {name}" for process, name in enumerate(made)]
        assert len(set(made)) == 1, f"launch {index} differs: {'; '.join(texts)}"
