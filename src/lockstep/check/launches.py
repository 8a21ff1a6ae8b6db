"""Sees every launch of a device program in this process: jitted, compiled ahead of time, eager, other libraries'.

CPU with gloo forgives a launch that only one host makes; a TPU pod does not. So what each host launched is compared.
The names of JAX's used here are private ones, so no run that trains comes through here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def record_launches() -> Iterator[list[str]]:
    """Yield the names of all launches inside, in order, with their number of local devices where that is above one."""
    from jax._src import pjit, stages
    from jax._src.interpreters import pxla

    launches: list[str] = []
    call = pxla.ExecuteReplicated.__call__

    def recorded(self: Any, *args: Any) -> Any:
        result = call(self, *args)  # raises where launches are refused: that was none
        count = len(self._local_devices)
        launches.append(self.name if count == 1 else f"{self.name} on {count} local devices")
        return result

    def slow_call(self: Any, *args: Any, **kwargs: Any) -> Any:
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
