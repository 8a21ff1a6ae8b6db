"""What a caller may catch, and what is printed once for all processes."""

import pytest

from lockstep import errors

EVERY = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_every_error_is_a_lockstep_error():
    assert len(EVERY) > 10 and all(issubclass(error, errors.LockstepError) for error in EVERY)


@pytest.mark.parametrize("error", [errors.ConfigError, errors.PromptError, errors.CapacityError])
def test_what_a_user_gave_is_a_value_error(error):
    assert issubclass(error, ValueError)


def test_a_wait_that_ran_out_is_a_timeout_error():
    assert issubclass(errors.HostTimeoutError, TimeoutError)


def test_only_what_every_process_raises_with_one_text_is_printed_once():
    once = {error for error in EVERY if getattr(error, "on_every_process", False)}
    assert once == {errors.PeerError, errors.DisagreementError, errors.DivergenceError}


def test_a_compiler_error_says_nothing_of_bytes_that_the_compiler_does_not_name():
    error = errors.HbmError("too large")
    assert (str(error), error.needed, error.limit) == ("too large", 0, 0)
