"""The TPU kernels, jax's ragged paged attention and ours that writes K/V, run on the CPU: their own code, copies and
blocks included, without the compiler.

Pallas' TPU interpreter (``pltpu.force_tpu_interpret_mode``, jax 0.11.2) stops at reshaped references of attention, the
plain one at its masked stores. So the plain one runs it here, with a masked store written as a read, a select and a
write, which is what it means.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from lockstep.models.attention import TpuAttention, select, tpu_kernels


class _Instead:
    """A module with one name replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _pallas_call(*arguments: Any, **options: Any) -> Any:
    return pl.pallas_call(*arguments, **options, interpret=True)


def _store(ref: Any, value: Any, *, mask: Any) -> None:
    ref[...] = jnp.where(mask, value, ref[...])


@contextlib.contextmanager
def kernel_on_cpu() -> Iterator[None]:
    """Inside, the kernels can run on the CPU, and are what `select_attention` chooses there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "pl", _Instead(pl, pallas_call=_pallas_call))
        patch.setattr(kernel, "pltpu", _Instead(pltpu, store=_store))
        patch.setattr(tpu_kernels, "pl", _Instead(pl, pallas_call=_pallas_call))
        patch.setattr(select, "kernel_of", lambda device, heads: TpuAttention)
        yield
