"""Device programs: compiled ahead of time, identified by a digest, and recorded in a ledger when launched."""

import contextlib
import dataclasses
import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from lockstep.hosts import MAY_DIFFER, Ledger, digest, environment
from lockstep.placement.device.compiler_errors import Compile, compile_lowered, explain

type AroundLaunch = Callable[[str], contextlib.AbstractContextManager[object]]
"""Takes a program's name; returns a context manager that is entered around its launch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """The compilation of a program."""

    name: str
    shapes: tuple[str, ...]  # its arguments: arrays as `float32[2,64]`, a pytree (weights) by count and bytes
    seconds: float  # seconds that tracing, lowering and compiling took in this process

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.shapes)}): {self.seconds:.2f} s"


@dataclasses.dataclass(kw_only=True, eq=False)
class Program:
    """One compiled program.

    Args:
        digests: The digests of its StableHLO, its devices and options, and its optimised HLO, by name. The last may
            differ between hosts: with a compilation cache per host, one deserialises while others compile.
    """

    name: str  # the same on every host
    digests: Mapping[str, str]
    traces: int  # how often its Python function was traced, which stays 1
    compilation: Compilation  # shapes of its arguments, and seconds
    _compiled: Any
    _ledger: Ledger

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of what must not differ: equal on two hosts where their compilers were given the same."""
        fixed = {name: text for name, text in self.digests.items() if not name.endswith(MAY_DIFFER)}
        return digest(*(part for item in sorted(fixed.items()) for part in item))

    def __call__(self, *arguments: Any) -> Any:
        """Launch the program; the ledger records the launch first, so that it has one that never returns."""
        self._ledger.record(self.name, self.digest)
        return self._compiled(*arguments)

    def memory(self) -> Any:
        """The compiler's memory analysis, in bytes per device."""
        return self._compiled.memory_analysis()

    def text(self) -> str:
        """The optimised program as the compiler prints it."""
        return str(self._compiled.as_text())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """A compiler, with what it is told of a program.

    Args:
        compile_with: The compiler; one whose programs are never launched may return analyses alone.
        options: Options of XLA; a compiler that does not know one of them gets none.
        ordered: Whether data dependences order the collectives. Where not, a job of several processes on CPU compiles
            without the compilation cache, see `without_cache`.
    """

    compile_with: Compile = compile_lowered
    options: Mapping[str, str] = MappingProxyType({})
    ordered: bool = True


def compile_program(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    mesh: Mesh,
    ledger: Ledger,
    donate: tuple[int, ...] = (),
    out_shardings: Any = None,
    compiler: Compiler = Compiler(),
) -> Program:
    """Traces, lowers and compiles ``function`` for ``arguments``; launches nothing and talks to no other host.

    Args:
        function: The function to trace; weights must be arguments of it, never captured.
        arguments: The arguments, arrays or shape structs with shardings.
        mesh: The mesh that is set while tracing, whatever context the caller runs in.
        donate: The positions of arguments that the program may overwrite.
        out_shardings: The shardings of the outputs; None leaves them to the compiler.

    Raises:
        CompilerError: The compiler refused the program; the message names it and says what to change.
    """
    traces = 0

    def traced(*args: Any) -> Any:
        nonlocal traces
        traces += 1
        return function(*args)

    traced.__name__ = f"lockstep_{name}"
    begin = time.perf_counter()
    options: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
    try:
        with jax.set_mesh(mesh):
            with without_directories():
                lowered = jax.jit(traced, donate_argnums=donate, **options).lower(*arguments)
            with contextlib.nullcontext() if compiler.ordered or not _is_simulated_pod(mesh) else without_cache():
                compiled = compiler.compile_with(lowered, name, compiler.options)
    except Exception as error:
        raise explain(name, dict(mesh.shape), error) from error
    shapes = tuple(_shape_text(argument) for argument in arguments)
    compilation = Compilation(name=name, shapes=shapes, seconds=time.perf_counter() - begin)
    optimised = compiled.as_text() if hasattr(compiled, "as_text") else None  # some compilers return analyses alone
    digests = {
        f"{name}: StableHLO": digest(lowered.as_text()),
        f"{name}: devices and options": digest(
            _devices(mesh), repr(donate), *map(repr, [*compiler.options.items(), *environment().items()])
        ),
        f"{name}: optimised HLO{MAY_DIFFER}": digest(without_source_locations(optimised or "")),
    }
    return Program(
        name=name,
        digests=digests,
        traces=traces,
        compilation=compilation,
        _compiled=compiled,
        _ledger=ledger,
    )


def _shape_text(argument: Any) -> str:
    leaves = jax.tree.leaves(argument)
    if len(leaves) == 1:
        return f"{leaves[0].dtype}[{','.join(map(str, leaves[0].shape))}]"
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return f"{len(leaves)} arrays of {size} bytes"


_LOWERING = threading.RLock()


@contextlib.contextmanager
def without_directories() -> Iterator[None]:
    """Leave the directories of source files out of programs that are lowered inside, unless the user has a pattern.

    A TPU kernel has the paths of its source in its payload: hosts with other home directories would disagree about it,
    and the installation of another commit would find nothing in the compilation cache. The setting is the process's,
    so threads take turns: `lockstep plan` traces one program while another is compiled.
    """
    with _LOWERING:
        before = jax.config.jax_hlo_source_file_canonicalization_regex
        if before is None:
            jax.config.update("jax_hlo_source_file_canonicalization_regex", "^.*/")
        try:
            yield
        finally:
            jax.config.update("jax_hlo_source_file_canonicalization_regex", before)


_COMPILING = threading.RLock()


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Neither read programs that are compiled inside from the compilation cache, nor write them there.

    XLA's CPU runtime starts the collectives of a program in order only where it compiled the program itself: one that
    was read from a cache may start a gather outside a loop before or after those inside, on each process as its threads
    have it, and Gloo then ends the process (`Received data size doesn't match expected size`). Settings of the process
    do it: no program compiles long enough to be written, and a key with metadata is that of no older entry.
    """
    settings = {
        "jax_persistent_cache_min_compile_time_secs": math.inf,
        "jax_compilation_cache_include_metadata_in_key": True,
    }
    with _COMPILING:
        before = {name: getattr(jax.config, name) for name in settings}
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


def _is_simulated_pod(mesh: Mesh) -> bool:
    """Whether a mesh has CPU devices of several processes."""
    devices = list(mesh.devices.flat)
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


_METADATA = re.compile(r", metadata=\{[^}]*\}")
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n?", re.MULTILINE)


def without_source_locations(hlo: str) -> str:
    """Remove source locations from optimised HLO: their numbering changes once a program comes from a cache."""
    return _METADATA.sub("", _TABLES.sub("", hlo))


def _devices(mesh: Mesh) -> str:
    """The devices of a mesh in order, with their processes and kinds."""
    return repr([(device.id, device.process_index, device.device_kind) for device in mesh.devices.flat])


def auto_axes(mesh: Any) -> frozenset[str]:
    """The axes of an abstract mesh over which ``shard_map`` can still map: those that none around it maps over."""
    return frozenset(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual
    )


def fetch(replicated: jax.Array) -> np.ndarray:
    """Wait for an array that is replicated on every device, and copy it to the host."""
    return start_fetch(replicated)()


def start_fetch(replicated: jax.Array) -> Callable[[], np.ndarray]:
    """Begin to copy an array that is replicated on every device to the host; what it returns waits for the copy."""
    local = replicated.addressable_data(0)
    local.copy_to_host_async()
    return lambda: np.asarray(local)
