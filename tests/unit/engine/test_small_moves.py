"""Norms that a train step returned elsewhere are moved back: nothing is compiled for them but the move."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import lockstep
from lockstep.engine import Auditor, small_moves
from lockstep.engine.decode_model import signature_of
from lockstep.engine.small_moves import are_small, describe_change, find_moves
from lockstep.errors import ConfigError
from lockstep.models import from_names
from lockstep.placement import LazyWeight, place
from tests import tiny
from tests.multiprocess.launches import record_launches
from tests.unit.engine.models import mesh_of

NORMS = ("attn_norm", "mlp_norm")
MESH = "1,4,1"


def placed(mesh=MESH, **specs):
    """The weights as FSDP has them, some elsewhere."""
    weights = tiny.placed_weights(mesh_of(mesh))

    def put(path, leaf):
        if path[-1].name not in specs:
            return leaf
        return place(np.asarray(leaf), NamedSharding(mesh_of(mesh), PartitionSpec(*specs[path[-1].name])))

    return tiny.CONFIG, jax.tree_util.tree_map_with_path(put, weights)


WHOLE = dict.fromkeys((*NORMS, "final_norm"), ())


def names(engine):
    return [each.name for each in engine.compilations]


def test_norms_that_were_moved_compile_one_move_and_no_decode_program(caplog):
    asked = tiny.requests(lengths=(5, 17))
    engine = lockstep.Engine(lockstep.EngineConfig(), mesh_of(MESH))
    first = engine.generate(placed(**WHOLE), asked)
    compiled, programs = names(engine), dict(engine.programs)
    with record_launches() as launches:
        assert engine.generate(placed(), asked) == first
    assert names(engine) == [*compiled, "move_small_weights"]
    assert {name: engine.programs[name] for name in programs} == programs, "no decode program was compiled again"
    assert engine.ledger.launches.count("move_small_weights") == 1 and not any(
        "device_put" in each for each in launches
    )
    for again in (placed(), placed(**WHOLE), placed()):
        assert engine.generate(again, asked) == first
    assert names(engine) == [*compiled, "move_small_weights"], "whichever comes, nothing is compiled any more"
    assert engine.ledger.launches.count("move_small_weights") == 3
    # Large weights whose placement is only written in another way, as the next train step may do.
    assert engine.generate(placed(q=(None, "fsdp", "tp", None, None)), asked) == first
    assert names(engine) == [*compiled, "move_small_weights"]
    assert "compiled again" not in caplog.text


@pytest.mark.slow
def test_large_weights_are_compiled_for_and_the_log_says_why(caplog, monkeypatch):
    monkeypatch.setattr(small_moves, "SMALL_BYTES", 1024)
    asked = tiny.requests(lengths=(5,))
    engine = lockstep.Engine(lockstep.EngineConfig(), mesh_of(MESH))
    engine.prepare(placed(), asked)
    compiled = names(engine)
    with caplog.at_level(logging.WARNING):
        engine.prepare(placed(q=(None, None, None, None, "fsdp")), asked)
    assert names(engine) == compiled * 2
    (text,) = [record.getMessage() for record in caplog.records if "compiled again" in record.getMessage()]
    assert "layers.q (2, 32, 2, 2, 8) was P(None, 'fsdp') and is P(None, None, None, None, 'fsdp')" in text.replace(
        "PartitionSpec", "P"
    )
    assert "out_shardings of jax.jit" in text


@pytest.mark.slow
def test_an_audit_follows_too():
    asked = tiny.requests(lengths=(5,))
    engine = lockstep.Engine(lockstep.EngineConfig(), mesh_of(MESH))
    answers = engine.generate(placed(**WHOLE), asked)
    auditor = Auditor(mesh_of(MESH))
    auditor.prepare(placed(**WHOLE), asked)
    programs = dict(auditor.programs)
    with pytest.raises(ConfigError, match="not those that the auditor prepared for"):
        auditor.run(placed(), asked, answers)
    for model in (placed(), placed(**WHOLE)):
        auditor.prepare(model, asked)
        assert auditor.run(model, asked, answers).logprob_gap < 1e-5
    assert auditor.programs == {"move_small_weights": auditor.programs["move_small_weights"], **programs}
    assert auditor.ledger.launches == ["move_small_weights", "audit", "audit"]


def test_moves_are_found_in_weights_of_any_form():
    def signature(spec, dtype=np.float32, layers=2):
        mesh = mesh_of(MESH)
        host = tiny.numpy_weights(dataclasses.replace(tiny.CONFIG, num_layers=layers))
        blocks = {
            field.name: [place(one.astype(dtype), NamedSharding(mesh, PartitionSpec())) for one in array]
            for field in dataclasses.fields(host.layers)
            if (array := getattr(host.layers, field.name)) is not None
        }
        blocks["attn_norm"] = [place(one, NamedSharding(mesh, spec)) for one in host.layers.attn_norm]
        outer = {"embed": host.embed, "final_norm": host.final_norm, "lm_head": host.lm_head}
        outer = {name: place(array, NamedSharding(mesh, PartitionSpec())) for name, array in outer.items()}
        table = {name: name for name in outer} | {name: f"{name}.{{}}" for name in blocks}
        return signature_of(tiny.CONFIG, from_names(table)({**outer, **blocks}))

    before = signature(PartitionSpec())
    assert find_moves(before, signature(PartitionSpec())) == ()
    moved = find_moves(before, signature(PartitionSpec("fsdp")))
    assert moved is not None and [move.name for move in moved] == ["layers.attn_norm"] * 2
    assert are_small(moved, before)
    assert find_moves(before, signature(PartitionSpec(), np.float16)) is None
    assert find_moves(before, signature(PartitionSpec(), layers=3)) is None
    assert "other shapes or dtypes" in describe_change(before, signature(PartitionSpec(), np.float16))


def test_another_mesh_is_not_a_small_move():
    one, other = (signature_of(*placed(mesh)) for mesh in (MESH, "1,2,2"))
    moved = find_moves(one, other)
    assert moved is not None and len(moved) == 12 and not are_small(moved, one)


def test_a_function_that_is_made_anew_is_named_as_the_reason():
    config, weights = placed()
    gate = weights.layers.gate

    def read(assemble):
        lazy = LazyWeight((gate,), assemble, gate.shape, gate.dtype, gate.sharding, stacked=True)
        return config, dataclasses.replace(weights, layers=dataclasses.replace(weights.layers, gate=lazy))

    one, other = (signature_of(*read(lambda block: block * 1)) for _ in range(2))
    assert describe_change(one, other).startswith("gate (<function ") and "no lambda" in describe_change(one, other)
    assert find_moves(signature_of(*read(same)), signature_of(*read(same))) == ()
    another = dataclasses.replace(config, max_seq_len=config.max_seq_len + 1), other[1]
    assert "another configuration" in describe_change(one, another)


def same(block):
    return block
