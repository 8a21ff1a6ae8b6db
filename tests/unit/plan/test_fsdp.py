"""What FSDP has to receive, counted by hand."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from lockstep.models import LoraConfig, LoraModel, skeleton
from lockstep.plan.fsdp import FsdpBytes, ThinPieces, fsdp_bytes, fsdp_floor, thin_pieces
from lockstep.xla import Collective
from tests.unit.engine.models import LLAMA

LAYER, EMBED, MLP, VOCAB = Axis("layer", 3), Axis("embed", 1024), Axis("mlp", 2048), Axis("vocab", 512)


def model(**axes: tuple[Axis, ...]) -> dict[str, hax.NamedArray]:
    return jax.eval_shape(lambda: {name: hax.zeros(each, jnp.float32) for name, each in axes.items()})


def mesh(dp: int, fsdp: int, tp: int) -> dict[str, int]:
    return {"dp": dp, "fsdp": fsdp, "tp": tp}


def test_layers_are_gathered_twice_other_weights_once_and_gradients_scattered_once() -> None:
    layers, head = 3 * 1024 * 2048, 1024 * 512
    given = model(up=(LAYER, EMBED, MLP), head=(EMBED, VOCAB))
    assert fsdp_floor(given, mesh(1, 4, 1), microbatches=5, itemsize=2) == 5 * 2 * (3 * layers + 2 * head) * 3 // 4
    assert fsdp_floor(given, mesh(1, 1, 1), microbatches=5, itemsize=2) == 0


def test_a_table_that_is_looked_up_is_not_gathered() -> None:
    tied, table = (
        model(**tables) for tables in ({"embed": (VOCAB, EMBED)}, {"embed": (VOCAB, EMBED), "head": (EMBED, VOCAB)})
    )
    one, two = (fsdp_floor(given, mesh(1, 4, 1), microbatches=5, itemsize=2) for given in (tied, table))
    assert one == two == 5 * 2 * 2 * 1024 * 512 * 3 // 4


def test_tensor_parallelism_leaves_each_device_a_part_to_gather() -> None:
    given = model(up=(LAYER, EMBED, MLP))
    assert fsdp_floor(given, mesh(1, 4, 2), microbatches=1, itemsize=2) == 3 * 2 * (3 * 1024 * 1024) * 3 // 4


def test_frozen_weights_are_gathered_and_nothing_of_them_is_scattered() -> None:
    lora = LoraConfig(r=4)
    base, adapters = skeleton(512, LLAMA), lora.shapes(LLAMA)

    def floor(dp: int, part: object) -> int:
        return fsdp_floor(part, mesh(dp, 4, 1), microbatches=5, itemsize=2)

    layers = sum(leaf.size for leaf in jax.tree.leaves(base.layers))
    rest = sum(leaf.size for leaf in jax.tree.leaves(base)) - layers - base.embed.array.size
    for dp in (1, 2):
        model = LoraModel(base=base, adapters=adapters, scale=lora.scale)
        assert floor(dp, model) - floor(dp, adapters) == pytest.approx(5 * 2 * (2 * layers + rest) * 3 / 4, abs=8)


def test_replicas_add_up_their_pieces_of_the_gradients_once_per_step() -> None:
    given, size = model(up=(LAYER, EMBED, MLP)), 2 * 3 * 1024 * 2048
    one, two = (fsdp_floor(given, mesh(dp, 4, 1), microbatches=7, itemsize=2) for dp in (1, 2))
    assert two - one == 2 * (size // 4) // 2


def collective(kind: str, groups: tuple[tuple[int, ...], ...], times: int = 1) -> Collective:
    return Collective(name="a", kind=kind, times=times, in_step=False, bytes=1000, groups=groups)


def test_what_crosses_tensor_parallel_devices_is_not_counted() -> None:
    found = [
        collective("all-gather", ((0, 2), (1, 3)), times=3),
        collective("all-reduce", ((0, 1), (2, 3))),
        collective("reduce-scatter", ((0, 2), (1, 3))),
    ]
    moved = fsdp_bytes(model(up=(LAYER, EMBED, MLP)), mesh(1, 2, 2), found, microbatches=1, itemsize=2)
    assert moved.received == 3 * 500 + 1000
    assert moved.ratio == pytest.approx(2500 / moved.floor)


def test_what_slices_exchange_is_nothing_that_fsdp_does_inside_one() -> None:
    between = dataclasses.replace(collective("all-reduce", ()), slices=2)
    assert fsdp_bytes(model(up=(EMBED, MLP)), mesh(1, 4, 1), [between], microbatches=1, itemsize=4).received == 0


def test_nothing_to_gather_has_no_ratio() -> None:
    assert FsdpBytes(floor=0, received=3).ratio is None


def test_pieces_thinner_than_a_tile_are_named_with_their_width() -> None:
    # 1024 over 16 devices is 64: fewer than the 128 columns of a tile, and more than its 16 rows.
    given = model(out=(LAYER, MLP, EMBED), up=(LAYER, EMBED, MLP), norm=(LAYER, EMBED))
    out = ThinPieces(parameter="['out']", axis="embed", size=1024, piece=64, tile=128)
    assert thin_pieces(given, mesh(1, 16, 1)) == (out,)
    assert fsdp_bytes(given, mesh(1, 16, 1), [], microbatches=1, itemsize=2).thin == (out,)
    assert thin_pieces(given, mesh(2, 8, 1)) == ()
    rows = [one for one in thin_pieces(given, mesh(1, 128, 1)) if one.parameter == "['up']"]
    assert [(one.piece, one.tile) for one in rows] == [(8, 16)]


def test_a_stage_gathers_its_own_layers_in_each_step_of_the_schedule_and_other_weights_once() -> None:
    layers, head = 3 * 1024 * 2048, 1024 * 512
    given = model(up=(LAYER, EMBED, MLP), head=(EMBED, VOCAB))
    staged = fsdp_floor(given, {"pp": 3, **mesh(1, 4, 1)}, microbatches=6, itemsize=2, bubble=2 / 8)
    assert staged == 2 * (8 * 3 * layers // 3 + 2 * head) * 3 // 4
