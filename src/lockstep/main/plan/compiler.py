"""The TPU compiler on a machine without a TPU: the slices that it knows, and its results, kept in files."""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
from jax.experimental import topologies
from rich.status import Status

from lockstep.errors import ConfigError, HbmError, VmemError
from lockstep.files import write_file
from lockstep.launch import Slice, slices, unpublished
from lockstep.placement.device import compile_with_options, explain
from lockstep.terminal import Console

NO_COMPILER: Final = (
    "lockstep plan compiles with the TPU compiler, and the package libtpu is not installed here. Install it with "
    "pip install 'jax-lockstep[plan]'; no TPU is needed."
)


COMPILERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    # Both TensorCores of a chip as one device, as JAX sees a v4.
    "v4": ("v4", {"chip_config_name": "megacore"}),
    "v5p": ("v5p", {}),
    "v5litepod": ("v5e", {}),
    "v6e": ("v6e", {}),
    "tpu7x": ("tpu7x", {}),  # each TensorCore is a device
}
"""The TPU compiler's name of each generation that it can be asked for, and options for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """One slice, or several of one kind."""

    name: str  # the name under which it is rented, such as `v5p-64`; of two slices `2xv5p-64`
    grid: tuple[int, ...]  # number of chips of a slice along each axis
    devices: tuple[jax.Device, ...]  # the devices as JAX would see them; they can be compiled for, not run on
    num_slices: int = 1

    @property
    def chips(self) -> int:
        """The number of chips, each of which is one device or several."""
        return math.prod(self.grid) * self.num_slices

    @property
    def slice_name(self) -> str:
        return self.name.partition("x")[2] if self.num_slices > 1 else self.name

    @property
    def hosts(self) -> int:
        """The number of processes of a job on the slice."""
        return len({device.process_index for device in self.devices})

    @property
    def devices_per_host(self) -> int:
        """The number of devices of each process."""
        return len(self.devices) // self.hosts

    @property
    def kind(self) -> str:
        return str(self.devices[0].device_kind)

    def describe(self) -> str:
        """The slice in one line of text."""
        grid, chips = "x".join(map(str, self.grid)), self.chips
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        cores = f" of {len(self.devices) // chips} devices" if len(self.devices) > chips else ""
        grid += "" if self.num_slices == 1 else f" in each of {self.num_slices} slices"
        return f"{self.name}: {chips} chips ({grid}){cores}, {hosts} with {chips // self.hosts} each"

    def on_host(self) -> tuple[jax.Device, ...]:
        """The devices of one process, as a slice of their own: the compiler does not take all parts of a larger one."""
        for name in names_of(self.slice_name.rpartition("-")[0]):
            if known_names()[name].hosts == 1 and len(topology(name).devices) == self.devices_per_host:
                return topology(name).devices
        return tuple(device for device in self.devices if device.process_index == 0)


def known_names() -> dict[str, Slice]:
    """Every slice that can be compiled for, by its name."""
    return {name: each for name, each in slices().items() if each.family.prefix in COMPILERS}


def names_of(prefix: str) -> list[str]:
    """The names of the slices of one generation, smallest first."""
    return [name for name in known_names() if name.rpartition("-")[0] == prefix]


@functools.cache
def topology(name: str) -> Topology:
    """The slice of a name, or several, as the TPU compiler describes them.

    Args:
        name: The name, such as ``v5p-64``, ``v5litepod-8``, ``v6e-16``; of two slices ``2xv5p-64``.

    Raises:
        ConfigError: There is no slice of this name, or the TPU compiler is not installed.
    """
    known = known_names()
    count, _, one = name.partition("x") if name[:1].isdecimal() else ("1", "", name)
    if generation := unpublished(one or name):
        raise ConfigError(
            f"topology {name!r} cannot be planned: no TPU compiler (libtpu up to 0.0.52) knows {generation}, and no "
            "slices of it are documented (2026-11-28). Plan for another generation, such as tpu7x-128."
        )
    if one not in known or not count.isdecimal() or int(count) < 1:
        listed = "; ".join(", ".join(names_of(prefix)) for prefix in COMPILERS)
        raise ConfigError(f"topology {name!r} is not known. Known: {listed}; 2x before a name: two of them.")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(NO_COMPILER)
    # The compiler would ask the machine which TPU it has, wait for an answer that never comes, and complain;
    # and it would let one process at a time load it, as if there were a device to share.
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_MIN_LOG_LEVEL", "3"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(variable, value)
    found, (compiler_name, options) = known[one], COMPILERS[known[one].family.prefix]
    if int(count) > 1:
        options = {**options, "num_slices": int(count)}
    if found.hosts == 1 and len(found.grid) == 2:  # the compiler would take it for several machines
        options = {**options, "chips_per_host_bounds": (*found.grid, 1)}
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{compiler_name}:{found.topology}", **options
        ).devices
    except Exception as error:  # the plugin raises what it likes
        raise ConfigError(
            f"the TPU compiler does not know topology {name} ({compiler_name}:{found.topology}): {error}. Install the "
            "version of libtpu that the extra [plan] names."
        ) from error
    return Topology(name=name, grid=found.grid, devices=tuple(devices), num_slices=int(count))


class CompileProgress:
    """Shows which programs are being compiled. Several threads may call it."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._quiet = quiet
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._now: dict[str, float] = {}
        self._status: Status | None = None

    def __call__(self, name: str, what: str) -> None:
        """Show what happens to a program."""
        with self._lock:
            if what == "compiling":
                self._now[name] = time.monotonic()
            else:
                self._now.pop(name, None)
            if self._quiet:
                return
            if self._status is not None:
                self._status.update(self._line())
                if what == "compiling":
                    return
            self._console.print(
                f"[{time.monotonic() - self._start:5.1f} s] {name}: {what}", highlight=False, markup=False
            )

    @contextlib.contextmanager
    def live(self) -> Iterator["CompileProgress"]:
        """Show a live line inside this context, where the console is a terminal."""
        if self._quiet or not self._console.is_terminal:
            yield self
            return
        with self._console.status("planning") as status:
            self._status = status
            try:
                yield self
            finally:
                self._status = None

    def _line(self) -> str:
        return "compiling " + ", ".join(self._now) if self._now else "planning"


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
    cached: bool  # whether the result was on disk

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
        found = self._read(key)
        if found is None:
            self._report(name, "compiling")
            start = time.monotonic()
            found = self._compile(lowered, name, options)
            self._write(key, found)
            took = f"{time.monotonic() - start:.1f} s"
            self._report(name, f"does not fit ({took})" if "refused" in found else f"compiled in {took}")
            cached = False
        else:
            self._report(name, "known to be too large, from the cache" if "refused" in found else "from the cache")
            cached = True
        if "refused" in found:
            raise _TOO_LARGE[found["refused"]](found["message"], needed=found["needed"], limit=found["limit"])
        summary = Summary(
            memory=Memory(**found["memory"]),
            text=found["text"],
            digest=found["digest"],
            seconds=found["seconds"],
            cached=cached,
        )
        self.summaries[name] = summary
        return summary

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
        memory = {each.name: int(getattr(analysis, each.name, 0)) for each in dataclasses.fields(Memory)}
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
