"""The TPU compiler compiles as it does for users, without the flags of `make test`, in several processes at once."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def no_flags() -> Iterator[None]:
    jax.devices()  # the other tests of this process need as many as the flags say
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "")
        for name in ("ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY"):
            patch.setenv(name, "1")
        yield
