"""A plan at the terminal."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from lockstep.main.plan.collectives import FsdpBytes, ThinPieces
from lockstep.main.plan.table import _checkpoint, _named, _print_fsdp, print_plan
from lockstep.main.plan.workload import Infeasibility
from lockstep.training import CheckpointerConfig, TrainerConfig

REASON = Infeasibility(key="engine.max_seqs", value=64, largest=32, text="too many [sequences]", place="a.yaml:3")


def printed(**values):
    workload = SimpleNamespace(command="sample", one_host=False, notes=("tokens [guessed]",))
    topology = SimpleNamespace(describe=lambda: "v5p-8 [2x2x1]", devices=[None] * 4, hosts=1)
    chip = SimpleNamespace(name="TPU v5p")
    given = {"workload": workload, "topology": topology, "chip": chip, "mesh_shape": {"dp": 1, "fsdp": 4}}
    given |= {"training": None, "sampling": [], "fits": False, "infeasibilities": [REASON]}
    console = Console(file=io.StringIO(), width=100)
    print_plan(SimpleNamespace(**given | values), console)
    return console.file.getvalue()


def test_it_says_what_is_planned_for_which_slice():
    text = printed()
    assert "sample on v5p-8 [2x2x1]" in text and "mesh (dp 1, fsdp 4), TPU v5p" in text


def test_notes_are_shown_as_they_are():
    assert "- tokens [guessed]" in printed()


def test_what_does_not_fit_names_key_value_the_largest_and_the_place():
    text = printed()
    assert "does not fit: too many [sequences]" in text
    assert "engine.max_seqs is 64; the largest that works is 32" in text
    assert "change engine.max_seqs at a.yaml:3" in text


def test_where_no_value_works_none_is_offered():
    nothing = Infeasibility(key="model", value="70B", largest=None, text="too large", place="a.yaml:1")
    assert "the largest that works" not in printed(infeasibilities=[nothing])


@pytest.mark.parametrize(("name", "text"), [("rollout", "rollout: step"), ("", "step")])
def test_a_round_of_sampling_is_named_by_its_block(name, text):
    assert _named(SimpleNamespace(workload=SimpleNamespace(name=name)), "step") == text


@pytest.mark.parametrize(
    ("bandwidth", "grace_s", "text"),
    [
        (1e9, 30, "25.8 s if each writes 1 GB/s (--write_bandwidth); SIGTERM leaves 30 s, it fits"),
        (0.5e9, 30, "51.5 s if each writes 0.5 GB/s (--write_bandwidth); SIGTERM leaves 30 s, it does not fit"),
        (1e9, 10, "SIGTERM leaves 10 s, it does not fit: what came after the last checkpoint is lost then"),
    ],
)
def test_a_checkpoint_has_the_state_of_the_devices_of_a_host(bandwidth, grace_s, text):
    topology = SimpleNamespace(devices_per_host=4)
    trainer = TrainerConfig(checkpointer=CheckpointerConfig(grace_s=grace_s))
    workload = SimpleNamespace(training=SimpleNamespace(trainer=trainer))
    plan = SimpleNamespace(
        parameters=5 * 2**30, frozen=3 * 2**30, optimizer=4 * 2**30, topology=topology, workload=workload,
        write_bandwidth=bandwidth,
    )  # fmt: skip
    assert _checkpoint(plan).startswith("a checkpoint: 24.00 GiB per host, ") and text in _checkpoint(plan)


def test_what_fsdp_needs_is_told_beside_what_is_received():
    console = Console(file=io.StringIO(), width=200)
    _print_fsdp(FsdpBytes(floor=2**30, received=2**30 + 2**28), console)
    text = console.file.getvalue()
    assert "FSDP needs 1.00 GiB per device" in text and "1.25 GiB are received" in text and "1.25 of it" in text


def test_where_nothing_has_to_be_gathered_nothing_is_told():
    console = Console(file=io.StringIO(), width=200)
    _print_fsdp(FsdpBytes(floor=0, received=2**20), console)
    assert "FSDP" not in console.file.getvalue()


def thin(parameter: str, size: int, piece: int) -> ThinPieces:
    return ThinPieces(parameter=parameter, axis="embed", size=size, piece=piece, tile=128)


def test_pieces_thinner_than_a_tile_are_warned_of_with_the_fix():
    console = Console(file=io.StringIO(), width=400)
    pieces = tuple(thin(f"layers[{name}]", 8192, 64) for name in "abcdef")
    _print_fsdp(FsdpBytes(floor=2**30, received=2**30, thin=pieces[:1]), console)
    _print_fsdp(FsdpBytes(floor=2**30, received=2**30, thin=pieces), console)
    one, six = (line for line in console.file.getvalue().splitlines() if line.startswith("warning"))
    assert "layers[a] (embed: 8,192 in pieces of 64): pieces thinner than a tile of the TPU (128 along embed)" in one
    assert "make fsdp in trainer.mesh_shape at most 64, and dp or tp larger" in one and "more" not in one
    assert "layers[d]" in six and "layers[e]" not in six and "and 2 more (--json has them)" in six


def test_a_model_that_is_smaller_than_a_tile_has_no_mesh_that_would_mend_it():
    console = Console(file=io.StringIO(), width=400)
    _print_fsdp(FsdpBytes(floor=2**30, received=2**30, thin=(thin("o", 32, 4),)), console)
    assert "sent with padding; the model is small." in console.file.getvalue()
