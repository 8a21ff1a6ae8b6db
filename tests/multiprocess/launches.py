"""Sees every launch of a device program in this process: jitted, eager, other libraries' (private JAX names: tests only).

CPU with gloo forgives a launch that only one host makes; a TPU pod does not. So tests compare what each host launched.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: the program's name and the number of devices it ran on."""

    name: str
    devices: int


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Inside, every launch is appended to the list, in order; of an AOT-compiled program only the first call is seen."""
    from jax._src import pjit
    from jax._src.interpreters import pxla

    launches: list[Launch] = []
    call = pxla.ExecuteReplicated.__call__

    def recorded(self, *args):
        launches.append(Launch(self.name, len(self._local_devices) if hasattr(self, "_local_devices") else 0))
        return call(self, *args)

    with (
        mock.patch.object(pjit, "_get_fastpath_data", lambda *a, **k: None),
        mock.patch.object(pxla.ExecuteReplicated, "__call__", recorded),
    ):
        yield launches
