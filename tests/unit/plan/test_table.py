"""A plan at the terminal."""

import io
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

from lockstep.placement.device import chip_named
from lockstep.plan import summary
from lockstep.plan.fsdp import FsdpBytes, ThinPieces
from lockstep.plan.step_time import StepTime, train_time
from lockstep.plan.table import _between_slices, _checkpoint, _named, _pipeline, _print_fsdp, print_plan
from lockstep.plan.workload import Infeasibility
from lockstep.training import CheckpointerConfig, TrainerConfig
from lockstep.xla import CollectiveSum

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
    ("bandwidth", "grace_s", "step_s", "text"),
    [
        (1e9, 60, 1.0, "2 steps at best and the save take 27.8 s, 51.5 s if another is under way; it fits\n"),
        (1e9, 30, 1.0, "27.8 s, 51.5 s if another is under way; it fits; a save that is under way then counts as"),
        (1e9, 28, 3.0, "1 step at best and the save take 28.8 s, 51.5 s if another is under way; it does not fit"),
        (0.5e9, 30, 1.0, "2 steps at best and the save take 53.5 s, 103 s if another is under way; it does not fit"),
    ],
)
def test_what_sigterm_has_to_leave_counts_steps_and_a_save_under_way(bandwidth, grace_s, step_s, text):
    trainer = TrainerConfig(checkpointer=CheckpointerConfig(grace_s=grace_s))
    workload = SimpleNamespace(training=SimpleNamespace(trainer=trainer))
    plan = SimpleNamespace(checkpoint=24 * 2**30, workload=workload, write_bandwidth=bandwidth)
    with mock.patch.object(summary, "train_time", lambda plan: SimpleNamespace(step_s=step_s)):
        found = _checkpoint(plan)
    rate = bandwidth / 1e9
    assert found.startswith("a checkpoint: 24.00 GiB on the busiest host, ") and f" {rate:g} GB/s (--write" in found
    assert f"SIGTERM leaves {grace_s} s: " in found and text in found


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


@pytest.mark.parametrize(
    ("kind", "bits", "flops", "text"),
    [
        (
            "TPU v5p",
            30,
            1e15,
            "2 slices add up their gradients once a step: 1.00 GiB per device at 25 GB/s per host take",
        ),
        ("TPU v5p", 30, 1e12, "hide behind a step of"),
        ("TPU v6e", 29, 1e15, "512.00 MiB per device at 50 GB/s per host take 42.9 ms"),
        ("TPU v4", 30, 1e12, "per device; no rate of the data-centre network is published here for TPU v4"),
    ],
)
def test_slices_are_told_what_their_gradients_take(kind, bits, flops, text):
    trainer = TrainerConfig(train_batch_size=16)
    training = SimpleNamespace(trainer=trainer, sequences_per_row=1, length=128, lora=None)
    workload = SimpleNamespace(
        training=training, dtype="float32", model=SimpleNamespace(gradient_checkpointing=True, exact=False)
    )
    plan = SimpleNamespace(
        chip=chip_named(kind, "tpu"), workload=workload, mesh_shape={"dcn": 2, "dp": 1, "fsdp": 8, "tp": 1},
        parameters=2**30, frozen=0, optimizer=2**31,
        training=SimpleNamespace(microbatches=1, flops=flops * 16, bubble=0.0),
        topology=SimpleNamespace(num_slices=2, devices_per_host=4),
        training_collectives=[
            CollectiveSum(kind="all-reduce", count=9, bytes=2**bits, devices=2, crosses_hosts=True, crosses_slices=True)
        ],
    )  # fmt: skip
    time = train_time(plan)
    assert time.collectives_s == 0, "not over the links inside a slice"
    found = _between_slices(plan, time)
    assert text in found and ("warning" in found) == (text.startswith("hide"))


def test_slices_that_are_stages_hand_on_microbatches_and_the_bubble_is_told():
    plan = SimpleNamespace(
        topology=SimpleNamespace(num_slices=2, devices_per_host=4), chip=chip_named("TPU v5p", "tpu"),
        mesh_shape={"pp": 2, "dp": 1, "fsdp": 8, "tp": 1}, training=SimpleNamespace(microbatches=8, bubble=1 / 9),
        workload=SimpleNamespace(training=SimpleNamespace(trainer=TrainerConfig())),
    )  # fmt: skip
    time = StepTime(compute_s=1.0, memory_s=0.0, collectives_s=0.0, tokens=1, slices_s=0.1, slices_bytes=2**30)
    assert "2 slices hand on microbatches, and add up their gradients once a step: 1.00 GiB" in _between_slices(
        plan, time
    )
    assert _pipeline(plan) == (
        "8 microbatches pass through 2 stages; the bubble, in which a stage has none, is 11.1% of the steps, "
        "(p - 1) / (m + p - 1)"
    )
    plan.workload.training.trainer = TrainerConfig(pipeline_repeats=4)
    assert "pass 4 times through 2 stages" in _pipeline(plan) and "(p - 1) / (v m + p - 1)" in _pipeline(plan)
    plan.mesh_shape.pop("pp")
    assert _pipeline(plan) is None
