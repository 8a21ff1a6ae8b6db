"""The launches of this process as texts, for checks inside tests."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def record_launches() -> Iterator[list[str]]:
    """The names of all launches inside, in order, each with its number of local devices where that is more than one.

    Seen are programs that are jitted, compiled ahead of time, and eager operations, of every library.

    Yields:
        The launches so far.

    Raises:
        ConfigError: This version of JAX is not known.

    Example:
        >>> from lockstep.check import record_launches
        >>> with record_launches() as launches:
        ...     total = jax.jit(lambda x: 2 * x)(1.0)
        >>> launches[-1]
        'jit(<lambda>)'
    """
    from lockstep.check import _jax

    names = LaunchNames()
    with _jax.watch_launches(names):
        yield names.launched


def cache_miss_logger() -> logging.Logger:
    """The logger that ``jax_explain_cache_misses`` writes to."""
    from lockstep.check import _jax

    return logging.getLogger(_jax.CACHE_MISS_LOGGER)


@dataclasses.dataclass(frozen=True)
class LaunchNames:
    """Collects the names of launches that did not fail.

    Args:
        launched: The names so far.
    """

    launched: list[str] = dataclasses.field(default_factory=list)

    def starts(self, program: Any, arguments: Sequence[Any]) -> None:
        """Nothing: it may fail."""

    def succeeds(self, program: Any, results: Sequence[Any]) -> None:
        """Add its name."""
        from lockstep.check import _jax

        name, count = _jax.name_of(program), len(_jax.local_devices(program))
        self.launched.append(name if count == 1 else f"{name} on {count} local devices")
