"""Sees every launch of a device program in this process: jitted, eager, other libraries'.

CPU with gloo forgives a launch that only one host makes; a TPU pod does not. So tests compare what each host launched.
The names of JAX's used here are private ones, so this is for tests alone.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def record_launches() -> Iterator[list[str]]:
    """The names of all launches inside, in order; of an AOT-compiled program only the first call is seen."""
    from jax._src import pjit
    from jax._src.interpreters import pxla

    launches: list[str] = []
    call = pxla.ExecuteReplicated.__call__

    def recorded(self, *args):
        result = call(self, *args)  # raises where launches are refused: that was none
        launches.append(self.name)
        return result

    with (
        mock.patch.object(pjit, "_get_fastpath_data", lambda *a, **k: None),
        mock.patch.object(pxla.ExecuteReplicated, "__call__", recorded),
    ):
        yield launches
