"""Compiler errors explained: which memory is too small, by how much, and what to change."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax

from lockstep.errors import CompilerError, HbmError, VmemError
from lockstep.placement.device.torn_cache import torn_entries_removed

type Compile = Callable[[jax.stages.Lowered, str, Mapping[str, str]], Any]
"""Takes a lowered program, its name and options of XLA for it; returns a `jax.stages.Compiled`, or an object with its
analyses alone where nothing will run."""

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE: Final = r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\b"
_VMEM: Final = re.compile(r"scoped.?vmem|memory space vmem|vmem (?:limit|capacity)|on vmem", re.IGNORECASE)
_HBM: Final = (
    re.compile(rf"required for [^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_PAIR: Final = (
    re.compile(rf"size {_SIZE} and limit {_SIZE}"),
    re.compile(rf"Used {_SIZE} of {_SIZE} vmem"),
)
_UNKNOWN_OPTION: Final = "No such compile option"
_SHOWN: Final = 300
"""The number of characters of a compiler's message that are shown; a kernel's message has the whole kernel in it."""


def compile_lowered(lowered: jax.stages.Lowered, name: str, options: Mapping[str, str]) -> jax.stages.Compiled:
    """Compile a program to run it."""
    with torn_entries_removed(f"jit_lockstep_{name}"):
        return compile_with_options(lowered, options)


def compile_with_options(lowered: jax.stages.Lowered, options: Mapping[str, str]) -> jax.stages.Compiled:
    """Compile a program with options of XLA, or without where this version of the compiler does not know one of them.

    Args:
        options: The values of options by name; none of them changes what the program computes.
    """
    try:
        return lowered.compile(compiler_options=dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if not options or _UNKNOWN_OPTION not in str(error):
            raise
        return lowered.compile()


def explain(name: str, mesh: Mapping[str, int], error: Exception) -> CompilerError:
    """Make an error that says what to change out of a compiler's error.

    Args:
        mesh: The axes and sizes of the mesh that it was compiled for.

    Returns:
        A `VmemError` where a kernel needs more of a core's vector memory than it may use, an `HbmError` where a program
        needs more device memory than there is, else a `CompilerError` with the beginning of the compiler's message.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text:
        if _VMEM.search(text):
            needed, limit = _sizes(_PAIR, text)
            sizes = f": it needs {_mib(needed)}, and the limit is {_mib(limit)}" if needed else ""
            return VmemError(
                f"program {name!r}: an attention kernel does not fit the vector memory (VMEM) of a TPU core{sizes}. "
                "Use smaller blocks or give the kernel a higher vmem_limit_bytes; lockstep's own table of blocks has "
                "both for every shape it knows, so leave the blocks to it, or lower max_prefill_size.",
                needed=needed,
                limit=limit,
            )
        needed, limit = _sizes(_HBM, text)
        if needed:
            return HbmError(
                f"program {name!r} needs {_gib(needed)} of device memory (HBM) and there are {_gib(limit)}.",
                needed=needed,
                limit=limit,
            )
    first = " ".join(text.split()) or type(error).__name__  # an assertion of JAX or XLA has no text
    return CompilerError(
        f"program {name!r} does not compile on the mesh {dict(mesh)}: {first[:_SHOWN]}"
        f"{'…' if len(first) > _SHOWN else ''}"
    )


def _sizes(patterns: tuple[re.Pattern[str], ...], text: str) -> tuple[int, int]:
    """The needed and the available bytes that a message names; zeros where it names none."""
    for pattern in patterns:
        if match := pattern.search(text):
            first, first_unit, second, second_unit = match.groups()
            return int(float(first) * _UNITS[first_unit]), int(float(second) * _UNITS[second_unit])
    return 0, 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
