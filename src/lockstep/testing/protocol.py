"""The messages between a test run and the processes that it starts, over a Unix socket; how these start and fail."""

import dataclasses
import enum
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "---- lockstep.testing begins function "
"""Before the number of a function, in a line of its own, in the log of its process."""


class Placeholder(enum.Enum):
    """A place holder among the arguments of a function for something that only the processes have."""

    HOSTS = "the Hosts of the process"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The module and name of a function."""

    module: str
    name: str  # its name in the module; dots lead through classes
    file: str

    @classmethod
    def to(cls, function: Callable[..., Any]) -> "Reference":
        """Return where another process finds a function."""
        name = function.__qualname__
        if "<" in name:
            raise ValueError(
                f"{name} cannot run in other processes, because they cannot find it. Define it at the top of its "
                "module, and hand it what it needs as arguments."
            )
        file = function.__code__.co_filename if hasattr(function, "__code__") else ""
        module = sys.modules.get(function.__module__)
        file = getattr(module, "__file__", None) or file
        if not os.path.isfile(file):
            raise ValueError(f"{name} is not in a file, so other processes cannot find it. Put it into a module.")
        stem = os.path.splitext(os.path.basename(file))[0]
        module_name = stem if function.__module__ == "__main__" else function.__module__
        return cls(module=module_name, name=name, file=os.path.abspath(file))

    def load(self) -> Any:
        """Return the function, bound to a new instance where it is a method."""
        target: Any = _module(self.module, self.file)
        for part in self.name.split("."):
            target = getattr(target, part)
            if isinstance(target, type):
                target = target()
        return target


def _module(name: str, file: str) -> ModuleType:
    """Import a module by its name where that leads to the file, else from the file itself."""
    try:
        module = importlib.import_module(name)
        if module.__file__ and os.path.samefile(module.__file__, file):
            return module
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of what the module imports
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """A process has joined its job."""

    index: int
    pid: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A process is to run a function.

    Args:
        number: The number of the function in this group, from 1.
        path: The import path of the test run; what the process lacks of it is added to its own.
        arguments: The pickled arguments, in order and by name: read after the path was added to.
    """

    number: int
    function: Reference
    path: Sequence[str]
    arguments: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a function in a process."""

    result: str | None = None  # what it returned, as JSON; None where it did not return
    failed: str | None = None  # the error that left it, in a line; None: none did
    skipped: str | None = None  # why it skipped itself (`pytest.skip`); None: it did not

    def __str__(self) -> str:
        if self.failed is not None:
            return f"raised {self.failed}"
        return "returned" if self.skipped is None else f"was skipped: {self.skipped}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftoverCheck:
    """A process is to look for what the function has left behind. Sent when it has ended in every process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftovers:
    """Threads, files and the like that a function has left behind in a process."""

    lines: Sequence[str]  # each thing in a line
    ledger: str  # the state of the ledger of the library's launches (`Ledger.state`)


Arguments = tuple[Sequence[Any], Mapping[str, Any]]  # the arguments of a function, in order and by name


DIRECTORY = Path.cwd()
"""The working directory of the processes: that in which the test run began, wherever a test has gone since."""
GRACE_S = 3  # seconds between SIGTERM and SIGKILL


def launch_command(processes: int, devices: int, log_dir: Path) -> list[str]:
    """Return a command of ``lockstep launch`` that lacks only the words of what it launches on this machine."""
    command = [sys.executable, "-c", "import sys; from lockstep.launch import main; sys.exit(main())"]
    command += ["--backend", "local", "--processes", str(processes), "--devices_per_process", str(devices)]
    return [*command, "--prefix", "always", "--log_dir", str(log_dir), "--grace_s", str(GRACE_S), "--"]


SHOWN_CHARACTERS = 300  # characters of a local variable that are shown
HIDDEN = ("<", "__", "@")  # beginnings of the names of variables that are not shown; pytest's and the compiler's own


def print_failure(error: BaseException, file: str) -> None:
    """Print the stack of an error, and the local variables where it left the test.

    ``assert x == y`` has no text of its own in a process that pytest does not run in. Arrays are shown by shape and
    type: to read one could mean to wait for a process that failed.
    """
    sys.stdout.flush()
    traceback.print_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    if frames and (values := frames[-1].f_locals):
        print(f"where {frames[-1].f_code.co_name} had:", file=sys.stderr)
        for name, value in values.items():
            if not name.startswith(HIDDEN):
                print(f"    {name} = {shown(value)}", file=sys.stderr)
    sys.stderr.flush()


def shown(value: Any) -> str:
    """Return a value as text, arrays by shape and type, at most `SHOWN_CHARACTERS` long."""
    import equinox

    try:
        text = " ".join(equinox.tree_pformat(value, width=10**6).split())
    except Exception as error:
        text = f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
