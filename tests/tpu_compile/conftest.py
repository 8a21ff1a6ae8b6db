"""The TPU compiler compiles as it does for users, without the flags of `make test`."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def no_flags() -> Iterator[None]:
    jax.devices()  # the other tests of this process need as many as the flags say
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "")
        yield
