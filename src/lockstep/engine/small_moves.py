"""Small weights that the trainer has placed elsewhere since programs were compiled: moved back, not compiled for.

Where a train step leaves the placement of its results to XLA, norms may come back split that went in whole. All
programs would be compiled again for that (docs/your-trainer.md, "A placement that changes").
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from lockstep.engine.decode_model import signature_of
from lockstep.hosts import Ledger
from lockstep.models import DecoderWeights, LlamaConfig
from lockstep.placement import LazyWeight, layer_differences, sources
from lockstep.placement.device import Compile, Compiler, Program, block_bytes, compile_program
from lockstep.printable import bytes_text

SMALL_BYTES: Final = 16 * 2**20
"""Bytes per device, before or after, of weights that are moved back at most: more than all norms of a model of 70
billion parameters have, and less than the memory that sizing leaves free."""
SMALL_SHARE: Final = 16
"""They have at most the ``1 / SMALL_SHARE`` of what the whole model has on a device."""

NAMED_AT_MOST = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """An array that is not where it was."""

    name: str
    at: int  # its position among the arrays that the weights are made of
    before: jax.ShapeDtypeStruct  # what it was when programs were compiled, as a struct
    now: jax.ShapeDtypeStruct

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.now.shape)} was {_placed(self.before)} and is {_placed(self.now)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallMoves:
    """Brings weights to where they were when programs were compiled."""

    signature: object  # the signature of the model that comes, see `signature_of`
    weights: DecoderWeights  # the weights that programs were compiled for, as structs
    moved: tuple[Moved, ...]  # the arrays that are elsewhere now
    program: Program | None  # None where every device has the same of them before and after

    def __call__(self, weights: DecoderWeights) -> DecoderWeights:
        """Launch the program, where there is one to launch, and return the weights in the old placement."""
        arrays, tree = jax.tree.flatten(sources(weights))
        if self.program is None or all(arrays[move.at].sharding == move.before.sharding for move in self.moved):
            return weights
        for move, array in zip(self.moved, self.program([arrays[move.at] for move in self.moved]), strict=True):
            arrays[move.at] = array
        parts = jax.tree.unflatten(tree, arrays)
        back: DecoderWeights = jax.tree.map(
            lambda old, part: dataclasses.replace(old, parts=part) if isinstance(old, LazyWeight) else part[0],
            self.weights,
            parts,
        )
        return back


class KnownModel:
    """The model that programs were compiled for, as structs, and the placement of it that came last."""

    def __init__(self, signature: object, mesh: Mesh, ledger: Ledger, compile_with: Compile) -> None:
        self._signature, self._mesh = signature, mesh
        self._ledger, self._compile_with = ledger, compile_with
        self._moves: SmallMoves | None = None

    @property
    def programs(self) -> dict[str, Program]:
        """The program that moves weights back by its name; none where none had to be."""
        program = self._moves.program if self._moves else None
        return {} if program is None else {program.name: program}

    def __contains__(self, read: tuple[LlamaConfig, DecoderWeights]) -> bool:
        """Whether the programs do for a model, with nothing more to compile."""
        return signature_of(*read) in (self._signature, self._moves.signature if self._moves else None)

    def follow(self, read: tuple[LlamaConfig, DecoderWeights]) -> bool:
        """Return whether the programs do for a model; compile what moves its small weights back, where that is new."""
        if read in self:
            return True
        if not can_follow(self._signature, signature_of(*read)):
            return False
        self._moves = _make_moves(self._signature, read, self._mesh, self._ledger, self._compile_with)
        return True

    def move_back(self, weights: DecoderWeights) -> DecoderWeights:
        """Return the weights of a model that is known where they were when programs were compiled."""
        return self._moves(weights) if self._moves else weights


def can_follow(before: Any, now: Any) -> bool:
    """Whether programs that were compiled for one signature do for another, small weights being moved back."""
    moved = find_moves(before, now)
    return moved is not None and are_small(moved, before)


def find_moves(before: Any, now: Any) -> tuple[Moved, ...] | None:
    """The arrays that were moved between two signatures; None where something else differs too.

    Args:
        before: The signature of the model that programs were compiled for.
        now: That of the model that comes.
    """
    (config, old), (new_config, new) = before, now
    trees: list[Any] = [jax.tree.structure(weights) for weights in (old, new)]
    if config != new_config or trees[0] != trees[1]:
        return None
    if list(map(_form, jax.tree.leaves(old))) != list(map(_form, jax.tree.leaves(new))):
        return None
    pairs = zip(jax.tree_util.tree_leaves_with_path(sources(old)), jax.tree_util.tree_leaves(sources(new)), strict=True)
    moves = []
    for at, ((path, struct), new_struct) in enumerate(pairs):
        if (struct.shape, struct.dtype) != (new_struct.shape, new_struct.dtype):
            return None
        if not _same_placement(struct, new_struct):
            name = ".".join(key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey))
            moves.append(Moved(name=name, at=at, before=struct, now=new_struct))
    return tuple(moves)


def are_small(moved: Sequence[Moved], before: Any) -> bool:
    """Whether arrays may be moved back: all on the mesh that they were on, with few bytes per device.

    Args:
        before: The signature of the model that programs were compiled for.
    """
    meshes = {_mesh(struct.sharding) for move in moved for struct in (move.before, move.now)}
    if len(meshes) > 1 or None in meshes:
        return False
    return max(sum(block_bytes(m.before) for m in moved), sum(block_bytes(m.now) for m in moved)) <= _limit(before)


def _make_moves(
    before: Any, read: tuple[LlamaConfig, DecoderWeights], mesh: Mesh, ledger: Ledger, compile_with: Compile
) -> SmallMoves:
    """Compile what moves the weights of a model back.

    Args:
        before: The signature of the model that programs were compiled for, from which ``read`` differs in small moves.
    """
    now = signature_of(*read)
    moved = find_moves(before, now)
    assert moved is not None, "only weights that were moved can be moved back"
    program = None
    if moved:
        program = compile_program(
            "move_small_weights",
            lambda arrays: arrays,
            [[move.now for move in moved]],
            mesh=mesh,
            ledger=ledger,
            out_shardings=[move.before.sharding for move in moved],
            compiler=Compiler(compile_with=compile_with),
        )
    return SmallMoves(signature=now, weights=before[1], moved=moved, program=program)


def describe_change(before: Any, now: Any) -> str:
    """Why programs are compiled again, and what to do, for the log."""
    moved = find_moves(before, now)
    if moved is None:
        if changed := _other_functions(before, now):
            return (
                f"{', '.join(changed[:NAMED_AT_MOST])} {'is' if len(changed) == 1 else 'are'} made by another function "
                "than before, shapes and dtypes are the same. Let the reader return a LazyWeight whose assemble is "
                "equal in every round: a function of a module, or a frozen dataclass, no lambda or functools.partial"
            )
        return "the model has another configuration, other shapes or dtypes than the one before"
    total = sum(block_bytes(move.now) for move in moved)
    more = f" and {len(moved) - NAMED_AT_MOST} more" if len(moved) > NAMED_AT_MOST else ""
    return (
        f"the model is not placed as before: {'; '.join(map(str, moved[:NAMED_AT_MOST]))}{more}: {bytes_text(total)} "
        f"per device, and up to {bytes_text(_limit(before))} are moved back without compiling. Let the train step "
        "return parameters where it takes them: out_shardings of jax.jit, or jax.lax.with_sharding_constraint in it"
    )


def describe_uneven_layers(signature: Any) -> str:
    """The weights whose layers differ in dtype or placement, and what bringing them together costs; '' for none."""
    uneven, total = list[str](), 0
    for path, weight in jax.tree_util.tree_leaves_with_path(signature[1]):
        for part in weight.parts if isinstance(weight, LazyWeight) and weight.by_layer else ():
            if differences := layer_differences(part):
                uneven.append(f"{path[-1].name} ({', '.join(differences)})")
                total += sum(map(block_bytes, part))
    more = f" and {len(uneven) - NAMED_AT_MOST} more" if len(uneven) > NAMED_AT_MOST else ""
    if not uneven:
        return ""
    return (
        f"layers of a weight differ, so each round casts or moves some of {bytes_text(total)} per device: "
        f"{'; '.join(uneven[:NAMED_AT_MOST])}{more}"
    )


def _other_functions(before: Any, now: Any) -> list[str]:
    """The weights, with their functions, of which nothing but the function is another; none where more is."""
    (config, old), (new_config, new) = before, now
    trees: list[Any] = [jax.tree.structure(weights) for weights in (old, new)]
    if config != new_config or trees[0] != trees[1]:
        return []
    pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    changed = [(path, leaf, new_leaf) for (path, leaf), new_leaf in pairs if _form(leaf) != _form(new_leaf)]
    if any(
        not (_form(leaf) and _form(new_leaf) and _form(leaf)[1:] == _form(new_leaf)[1:])
        for _, leaf, new_leaf in changed
    ):
        return []
    return [f"{path[-1].name} ({leaf.assemble!r:.100})" for path, leaf, _ in changed]


def _limit(signature: Any) -> int:
    """Bytes per device that may be moved back."""
    return min(SMALL_BYTES, sum(map(block_bytes, jax.tree.leaves(sources(signature[1])))) // SMALL_SHARE)


def _form(leaf: Any) -> tuple[Any, ...]:
    """The identity of a weight, its placement left out."""
    if not isinstance(leaf, LazyWeight):
        return ()
    layers = leaf.stacked, leaf.by_layer, leaf.layer_axis
    return leaf.assemble, leaf.shape, leaf.dtype, *layers, jax.tree.structure(leaf.parts)


def _mesh(sharding: Sharding | None) -> Any:
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _same_placement(struct: jax.ShapeDtypeStruct, new_struct: jax.ShapeDtypeStruct) -> bool:
    """Whether every device has the same of both, however it is written: ``P("fsdp", None)`` is ``P("fsdp")``."""
    if struct.sharding is None or new_struct.sharding is None:
        return struct.sharding is new_struct.sharding
    return bool(struct.sharding.is_equivalent_to(new_struct.sharding, len(struct.shape)))


def _placed(struct: jax.ShapeDtypeStruct) -> str:
    return str(struct.sharding.spec) if isinstance(struct.sharding, NamedSharding) else str(struct.sharding)
