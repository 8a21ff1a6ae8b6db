"""Device programs: compiled ahead of time, known by digest, recorded in order when launched."""

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep.device.compiler_errors import Compile, compile_lowered, explain
from lockstep.hosts import Ledger, digest, environment

type AroundLaunch = Callable[[str], contextlib.AbstractContextManager[object]]
"""Takes a program's name; the context surrounds a launch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a program was compiled.

    Args:
        name: of the program.
        shapes: of its arguments: single arrays as ``float32[2,64]``, trees of them (weights) by count and bytes.
        seconds: that tracing, lowering and compiling took on this process.
    """

    name: str
    shapes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.shapes)}): {self.seconds:.2f} s"


@dataclasses.dataclass(kw_only=True, eq=False)
class Program:
    """One compiled program.

    Args:
        name: what hosts and people call it.
        digests: of its StableHLO, its optimised HLO, and what else it was compiled with, by name.
        compilation: its shapes, and how long it took.
        traces: times that its Python function was traced; 1 for as long as it lives.
    """

    name: str
    digests: Mapping[str, str]
    traces: int
    compilation: Compilation
    _compiled: Any
    _ledger: Ledger

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of all ``digests``: equal on every host that runs the same."""
        return digest(*(part for item in sorted(self.digests.items()) for part in item))

    def __call__(self, *arguments: Any) -> Any:
        """Launches the program; the launch is recorded first, so that a launch that never returns is on record."""
        self._ledger.record(self.name, self.digest)
        return self._compiled(*arguments)

    def memory(self) -> Any:
        """The compiler's memory analysis, in bytes per device."""
        return self._compiled.memory_analysis()

    def text(self) -> str:
        """The optimised program as the compiler prints it."""
        return str(self._compiled.as_text())


def compile_program(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    mesh: Mesh,
    ledger: Ledger,
    donate: tuple[int, ...] = (),
    out_shardings: Any = None,
    compile_with: Compile = compile_lowered,
) -> Program:
    """Traces, lowers and compiles ``function`` for ``arguments``; launches nothing and talks to no other host.

    Args:
        name: the program's name.
        function: traceable; weights must be arguments, never captured.
        arguments: arrays or shape structs with shardings.
        mesh: entered while tracing, whatever context the caller runs in.
        ledger: where launches are recorded.
        donate: positions of arguments that may be overwritten.
        out_shardings: of the outputs, or None to leave them to the compiler.
        compile_with: the compiler; another one may give figures alone.

    Raises:
        CompilerError: the compiler refused the program; named.
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
            lowered = jax.jit(traced, donate_argnums=donate, **options).lower(*arguments)
            compiled = compile_with(lowered, name)
    except Exception as error:
        raise explain(name, dict(mesh.shape), error) from error
    shapes = tuple(_shape_text(argument) for argument in arguments)
    compilation = Compilation(name=name, shapes=shapes, seconds=time.perf_counter() - begin)
    optimised = compiled.as_text() if hasattr(compiled, "as_text") else None  # a compiler may give figures alone
    digests = {
        f"{name}: StableHLO": digest(lowered.as_text()),
        f"{name}: optimised HLO": digest(without_places(optimised or "")),
        f"{name}: devices and options": digest(_devices(mesh), repr(donate), *map(repr, environment().items())),
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


_METADATA = re.compile(r", metadata=\{[^}]*\}")
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n?", re.MULTILINE)


def without_places(hlo: str) -> str:
    """Optimised HLO without the places in source files, whose numbering differs once a program comes from a cache."""
    return _METADATA.sub("", _TABLES.sub("", hlo))


def _devices(mesh: Mesh) -> str:
    """Which device of which process computes which part."""
    return repr([(device.id, device.process_index, device.device_kind) for device in mesh.devices.flat])


def fetch(replicated: jax.Array) -> np.ndarray:
    """The value of an array that is whole on every device; waits for it."""
    return np.asarray(replicated.addressable_data(0))
