"""The settings of JAX that rounds run under, whatever those of the training loop are."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Run the block under the settings of JAX that the library's programs are written for.

    Training loops guard themselves: 64-bit numbers by default, no implicit transfers, no promotion of ranks or dtypes,
    no jit, no tracing, no NaN. Under these the programs of a round would fail, or be others. The settings of other
    threads stay, and those of this one come back, so that nothing of the training loop is traced again.
    """
    with contextlib.ExitStack() as stack:
        for setting in (
            jax.enable_x64(False),
            jax.transfer_guard("allow"),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.disable_jit(False),
            jax.no_tracing(False),
            jax.debug_nans(False),
            jax.debug_infs(False),
        ):
            stack.enter_context(setting)
        yield
