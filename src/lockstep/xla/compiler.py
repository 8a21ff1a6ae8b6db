"""The TPU compiler's results, kept in files, and its progress."""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax

from lockstep.errors import ConfigError, HbmError, VmemError
from lockstep.files import write_file
from lockstep.placement.device import compile_with_options, explain
from lockstep.terminal import Console


class CompileProgress:
    """Shows which programs are being compiled, and for how long. Several threads may call it.

    Args:
        every: The seconds after which a log says again what is still being compiled.
    """

    def __init__(self, console: Console | None = None, every: float = 60.0) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._every = every
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._now: dict[str, float] = {}
        self._live = False

    def __call__(self, name: str, event: str) -> None:
        """Show what happens to a program."""
        with self._lock:
            if event == "compiling":
                self._now[name] = time.monotonic()
            else:
                self._now.pop(name, None)
            if not (self._live and event == "compiling"):
                self._print(f"{name}: {event}")

    @contextlib.contextmanager
    def live(self) -> Iterator["CompileProgress"]:
        """Show inside this context what is being compiled: on a terminal in a live line, in a log from time to time."""
        self._live = self._console.is_terminal
        ended = threading.Event()
        thread = threading.Thread(target=self._repeat, args=(ended,), daemon=True)
        thread.start()
        try:
            with self._console.status(self) if self._live else contextlib.nullcontext():
                yield self
        finally:
            self._live = False
            ended.set()
            thread.join()

    def __rich__(self) -> str:
        """The live line, which is drawn anew several times a second."""
        now = time.monotonic()
        names = [f"{name} ({now - start:.0f} s)" for name, start in tuple(self._now.items())]
        return "compiling " + ", ".join(names) if names else "planning"

    def _repeat(self, ended: threading.Event) -> None:
        while not ended.wait(self._every):
            with self._lock:
                if self._now and not self._live:
                    self._print(f"still {self.__rich__()}")

    def _print(self, line: str) -> None:
        self._console.print(f"[{time.monotonic() - self._start:5.1f} s] {line}", highlight=False, markup=False)


_TOO_LARGE: Final[dict[str, type[HbmError | VmemError]]] = {"hbm": HbmError, "vmem": VmemError}
_FORMAT: Final = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes per device of one compiled program, under the names of XLA's ``CompiledMemoryStats``."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int
    peak_memory_in_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of compiling a program; it stands in for `jax.stages.Compiled` where nothing will run."""

    memory: Memory
    text: str
    digest: str
    seconds: float  # seconds that compiling took, when it was done

    def memory_analysis(self) -> Memory:
        return self.memory

    def as_text(self) -> str:
        return self.text


def default_directory() -> Path:
    """The directory where results are kept by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / "plan"


def lowered_digest(lowered: jax.stages.Lowered) -> str:
    """The sha256 of a program as the compiler gets it."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


class CompileCache:
    """A compiler for one topology that remembers its results, also that a program needs too much memory."""

    def __init__(self, topology: str, directory: Path | None, report: Callable[[str, str], None]) -> None:
        self._topology, self._directory, self._report = topology, directory, report
        self.summaries: dict[str, Summary] = {}  # the latest result of each program, by the program's name

    def __call__(
        self, lowered: jax.stages.Lowered, name: str, options: Mapping[str, str] = MappingProxyType({})
    ) -> Summary:
        """Look a program up, or compile it."""
        key = self._key(lowered, options)
        content = self._read(key)
        if content is None:
            self._report(name, "compiling")
            start = time.monotonic()
            content = self._compile(lowered, name, options)
            self._write(key, content)
            took = f"{time.monotonic() - start:.1f} s"
            self._report(name, f"does not fit ({took})" if "refused" in content else f"compiled in {took}")
        else:
            self._report(name, "known to be too large, from the cache" if "refused" in content else "from the cache")
        if "refused" in content:
            raise _TOO_LARGE[content["refused"]](content["message"], needed=content["needed"], limit=content["limit"])
        self.summaries[name] = Summary(**content | {"memory": Memory(**content["memory"])})
        return self.summaries[name]

    def _compile(self, lowered: jax.stages.Lowered, name: str, options: Mapping[str, str]) -> dict[str, Any]:
        start = time.monotonic()
        try:
            compiled = compile_with_options(lowered, options)
        except Exception as error:
            explained = explain(name, {}, error)
            for kind, cls in _TOO_LARGE.items():
                if isinstance(explained, cls):
                    return {
                        "refused": kind,
                        "message": str(explained),
                        "needed": explained.needed,
                        "limit": explained.limit,
                    }
            raise
        analysis = compiled.memory_analysis()
        memory = {field.name: int(getattr(analysis, field.name, 0)) for field in dataclasses.fields(Memory)}
        return {
            "memory": memory,
            "text": compiled.as_text() or "",
            "digest": lowered_digest(lowered),
            "seconds": time.monotonic() - start,
        }

    def _key(self, lowered: jax.stages.Lowered, options: Mapping[str, str]) -> str:
        try:
            compiler = importlib.metadata.version("libtpu")
        except importlib.metadata.PackageNotFoundError:
            compiler = "none"
        jaxlib, flags = importlib.metadata.version("jaxlib"), os.environ.get("LIBTPU_INIT_ARGS", "")
        words = f"{_FORMAT} {self._topology} jaxlib {jaxlib} libtpu {compiler} {flags} {sorted(options.items())}"
        return hashlib.sha256(f"{words} {lowered_digest(lowered)}".encode()).hexdigest()

    def _path(self, key: str) -> Path | None:
        return None if self._directory is None else self._directory / f"{key}.json.gz"

    def _read(self, key: str) -> dict[str, Any] | None:
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return dict(json.load(file))
        except (OSError, EOFError, ValueError, TypeError, RecursionError):  # a file that was damaged is compiled again
            return None

    def _write(self, key: str, values: Mapping[str, Any]) -> None:
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, gzip.compress(json.dumps(values).encode(), compresslevel=5))
        except OSError as error:
            raise ConfigError(
                f"the result of compiling cannot be kept in {path.parent}: {error}. Give another --cache_dir, or "
                "--cache_dir none."
            ) from error
