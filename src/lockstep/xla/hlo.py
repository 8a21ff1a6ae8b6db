"""An optimised program as the compiler prints it: its operations, and how often each runs.

An operation in a loop counts as often as the loop turns. A loop whose end is an argument (the steps of a decode launch)
counts once, so that its operations are those of one step; everything around it is counted per launch. One branch of a
condition is counted.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

_BITS: Final = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "token": 0, "opaque": 0, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
_HEAD: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY: Final = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_METADATA: Final = re.compile(r"kernel_metadata=\{\n.*?\n\}", re.DOTALL)
"""The description that a kernel has of itself: the only text of an operation that goes over several lines."""
_BRACKET: Final = re.compile(r"[()]")
_CALLED: Final = re.compile(r"\b(calls|to_apply|body|condition|\w+_computations?)=\{?((?:%[\w.\-]+(?:, )?)+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array in the text of a program."""

    dtype: str  # the element type, as HLO names it
    dims: tuple[int, ...]
    in_hbm: bool  # whether the array is in the device's memory; else it is in a memory of the core

    @property
    def bytes(self) -> int:
        """The bytes of the elements, without the padding of tiles."""
        return math.prod(self.dims) * _BITS.get(self.dtype, 32) // 8


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One operation."""

    name: str  # the name, without `%`
    kind: str  # the opcode, such as `fusion` or `all-reduce-start`
    arrays: tuple[Array, ...]  # the arrays of the result, of which a tuple has several
    operands: tuple[str, ...]
    line: str
    root: bool  # whether the operation is the result of its computation

    def called(self) -> dict[str, list[str]]:
        """The names of the computations that the operation refers to, by their roles."""
        names_by_role: dict[str, list[str]] = {}
        for role, names in _CALLED.findall(self.line):
            names_by_role.setdefault(role, []).extend(
                name.strip().lstrip("%") for name in names.split(",") if name.strip()
            )
        return names_by_role

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """An operation and how often it runs."""

    op: Op
    computation: str  # the name of the computation that has it
    times: int  # number of times that it runs in a launch, where a loop without a known end counts once
    in_step: bool  # whether it is inside such a loop


class Hlo:
    """A parsed program.

    Args:
        unmet: The scopes (`jax.named_scope`) of conditions that do not hold. Every other condition holds: its last
            branch runs, for `jax.lax.cond` puts the branch of a true condition last.
    """

    def __init__(self, text: str, unmet: Collection[str] = ()) -> None:
        self._unmet = frozenset(unmet)
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry = ""
        current: dict[str, Op] | None = None
        for line in _METADATA.sub("kernel_metadata={}", text).splitlines():
            head = None if line.startswith(" ") else _HEAD.match(line)
            if head:
                current = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (op := _parse(line)) is not None:
                current[op.name] = op
        if not self.entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")

    @functools.cached_property
    def runs(self) -> list[Run]:
        """Every operation that runs by itself (not inside a fusion), with how often it runs."""
        runs: list[Run] = []

        def visit(name: str, times: int, in_step: bool) -> None:
            for op in self.computations.get(name, {}).values():
                runs.append(Run(op=op, computation=name, times=times, in_step=in_step))
                called = op.called()
                if op.kind == "while":
                    turns = self.turns(name, op)
                    visit(called["body"][0], times * (turns or 1), in_step or turns is None)
                elif op.kind == "conditional":
                    visit(self._branch(op, called), times, in_step)
                elif op.kind in ("call", "async-start", "call-start"):  # the last: on a SparseCore of a TPU7x
                    for role in ("called_computations", "to_apply", "calls"):
                        for computation in called.get(role, ()):
                            visit(computation, times, in_step)

        visit(self.entry, 1, False)
        return runs

    def _branch(self, op: Op, called: Mapping[str, Sequence[str]]) -> str:
        scope = re.search(r'op_name="(?:[^"]*/)?([^"/]+)/cond"', op.line)
        met = scope is None or scope[1] not in self._unmet
        if "true_computation" in called:
            return called["true_computation" if met else "false_computation"][0]
        return called["branch_computations"][-1 if met else 0]

    def turns(self, computation: str, loop: Op) -> int | None:
        """The turns of a ``while`` whose counter goes from one constant to another; None where its end is none."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
        if known:
            return int(known[1])
        called = loop.called()
        condition, body = (self.computations[called[role][0]] for role in ("condition", "body"))
        test = next(op for op in condition.values() if op.root)
        if test.kind != "compare" or "direction=LT" not in test.line:
            return None
        counter, end = (condition[name] for name in test.operands)
        last, index = _constant(end), _index(counter)
        if last is None or index is None:
            return None
        first, step = 0, 1
        start = self.computations[computation].get(loop.operands[0])
        if start is not None and start.kind == "tuple":
            begin = self.computations[computation].get(start.operands[index])
            first = _constant(begin) or 0 if begin is not None else 0
        root = next(op for op in body.values() if op.root)
        if root.kind == "tuple":
            change = body.get(root.operands[index])
            if change is not None and change.kind == "add":
                steps = [_constant(body[name]) for name in change.operands if name in body]
                step = next((value for value in steps if value), 1)
        return max(0, -(-(last - first) // step))

    def array_of(self, computation: str, name: str) -> tuple[Array, ...]:
        op = self.computations[computation].get(name)
        return () if op is None else op.arrays


def vmem(text: str) -> int:
    """The bytes of vector memory of the operation of an optimised TPU program that needs most."""
    sizes = re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', text)
    return max(map(int, sizes), default=0)


def _parse(line: str) -> Op | None:
    text = line.strip()
    root = text.startswith("ROOT ")
    text = text.removeprefix("ROOT ")
    if not text.startswith("%") or " = " not in text:
        return None
    name, rest = text.split(" = ", 1)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    inner = rest[opening + 1 : _closing(rest, opening)]
    return Op(
        name=name.lstrip("%"),
        kind=rest[:opening],
        arrays=tuple(
            Array(dtype, tuple(int(size) for size in dims.split(",") if size), "S(" not in layout)
            for dtype, dims, layout in _ARRAY.findall(shape)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", inner)),
        line=text,
        root=root,
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for bracket in _BRACKET.finditer(text, opening):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.start()
    raise ValueError(f"a bracket is never closed: {text[opening:][:80]}")


def _constant(op: Op) -> int | None:
    match = re.search(r"constant\((-?\d+)\)", op.line) if op.kind == "constant" else None
    return int(match[1]) if match else None


def _index(op: Op) -> int | None:
    match = re.search(r"index=(\d+)", op.line) if op.kind == "get-tuple-element" else None
    return int(match[1]) if match else None
