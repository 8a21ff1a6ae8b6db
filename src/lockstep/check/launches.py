"""The launches of this process: recorded from the start of an unchanged script, and as texts for tests."""

import atexit
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
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
    """Collects the names of launches that did not fail."""

    launched: list[str] = dataclasses.field(default_factory=list)

    def starts(self, program: Any, arguments: Sequence[Any]) -> None:
        """Nothing: it may fail."""

    def succeeds(self, program: Any, results: Sequence[Any]) -> None:
        from lockstep.check import _jax

        name, count = _jax.name_of(program), len(_jax.local_devices(program))
        self.launched.append(name if count == 1 else f"{name} on {count} local devices")


DIRECTORY = "LOCKSTEP_CHECK_DIRECTORY"
"""The variable that names the directory of the recorded files; without it nothing is recorded."""
STARTUP = "startup"
"""The folder of that directory which is first on the path of imports and has the ``sitecustomize`` module."""

_WATCHING: list[contextlib.AbstractContextManager[None]] = []
"""The hooks, which must not be collected, and so closed, while the process lives."""


def at_start() -> None:
    """Have JAX recorded when this process imports it, and run the ``sitecustomize`` module that ours stands before."""
    directory = Path(os.environ[DIRECTORY])
    search_path = [path for path in sys.path if path and Path(path) != directory / STARTUP]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", search_path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    sys.meta_path.insert(0, JaxImport())


class JaxImport(importlib.abc.MetaPathFinder):
    """Calls `record` when ``jax`` has been imported: what the script sets before is set, and others pay nothing."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """The module's own spec, whose loader then calls `record`; None for all other modules."""
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            execute(module)
            record()

        vars(spec.loader)["exec_module"] = execute_and_record
        return spec


def record() -> None:
    """Record this process, in the job that the environment names; a child of a recorded process is not recorded."""
    from lockstep.check import _jax
    from lockstep.check.recorder import Recorder

    index = int(os.environ["LOCKSTEP_PROCESS_ID"])
    try:
        recorder = Recorder(Path(os.environ[DIRECTORY]) / f"process-{index}.jsonl", index)
    except FileExistsError:
        return
    _jax.check_version()

    def at_exit() -> None:
        atexit.register(recorder.end)

    at_exit()
    # Registered again when it has joined: what is registered last runs first, before JAX waits for the others.
    address, count = os.environ["LOCKSTEP_COORDINATOR_ADDRESS"], int(os.environ["LOCKSTEP_NUM_PROCESSES"])
    _jax.join_job(address, count, index, at_exit)
    _jax.see_compiled(recorder.compiled)
    _jax.see_arrays(recorder.put)
    _jax.see_comparisons(recorder.compares)
    _jax.see_keys(recorder.key_added, recorder.key_deleted)
    _WATCHING.append(_jax.watch_launches(recorder))
    _WATCHING[0].__enter__()
    printed = sys.excepthook

    def note_and_print(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        recorder.error(value, trace)
        printed(kind, value, trace)

    sys.excepthook = note_and_print
    recorder.watch()
