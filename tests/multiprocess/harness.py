"""`lockstep.testing` as the tests of this repository use it: faster processes, and results that are kept for others."""

import functools
from collections.abc import Callable
from typing import Any

from lockstep.testing import PoolSettings, configure
from lockstep.testing import run_processes as run_processes
from lockstep.testing import run_threads as run_threads
from lockstep.testing.pool import POOL as POOL
from lockstep.testing.pool import run_command as run_command
from lockstep.testing.pool import run_unattended as run_unattended
from tests.multiprocess import permuted
from tests.multiprocess.launcher import cache_environment

configure(PoolSettings(environment=cache_environment(), setup=permuted.permute_as_told, patience=4.0))


def cached[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Like ``functools.cache``, errors too: what fails for one test does not take its time for all others again."""

    @functools.cache
    def outcome(*args: Any, **kwargs: Any) -> tuple[Any, BaseException | None]:
        try:
            return function(*args, **kwargs), None
        except Exception as error:
            return None, error

    def again(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result, error = outcome(*args, **kwargs)
        if error is not None:
            raise error
        return result

    return again
