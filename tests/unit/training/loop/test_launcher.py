"""What a user reads when the runtime fails in a train step."""

from types import SimpleNamespace

import jax
import pytest

from lockstep.errors import HostError
from lockstep.training.loop.launcher import named_failure


def fail(count: int) -> None:
    hosts = SimpleNamespace(count=count, index=1, missing=lambda: " Missing: process 2.")
    with named_failure(hosts, 7):  # type: ignore[arg-type]  # a stand-in with the three attributes that are read
        raise jax.errors.JaxRuntimeError("connection closed by peer")


def test_a_process_of_several_says_who_is_missing_and_what_the_runtime_said() -> None:
    with pytest.raises(HostError) as error:
        fail(4)
    assert str(error.value).startswith("the train step after 7 steps failed on process 1 of 4. Missing: process 2. If")
    assert str(error.value).endswith("The runtime says: connection closed by peer")


def test_with_one_process_the_runtimes_own_error_is_raised() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="^connection closed by peer$"):
        fail(1)
