"""Whole runs on the devices of one process: what is sampled, learned from and told."""

import collections
import dataclasses
import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.engine.sizing.cost_model import Estimate
from lockstep.errors import ConfigError
from lockstep.report import read_jsonl
from lockstep.training import GrpoConfig
from lockstep.training.objectives import logprobs
from lockstep.training.objectives.policy_loss import group_advantages
from lockstep.training.rl import Rollouts
from lockstep.training.rl.rewards import FunctionReward, LengthReward
from lockstep.types import RoutedExperts
from tests import rollouts as runs
from tests import tiny
from tests.adapters import LORA
from tests.clock import until
from tests.memory import live_arrays
from tests.unit.training.rl.parrot import Parrot


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Three steps with everything on: reference, trainer's log-probabilities, two updates per rollout."""
    tracker, directory = runs.Recorder(), tmp_path_factory.mktemp("run")
    trainer, rollouts, model = runs.make(
        steps=4,
        tracker=tracker,
        loss={"use_rollout_logprobs": False, "importance_cap": 2.0, "kl_coefficient": 0.1},
        run={"num_iterations": 2},
        log_dir=str(directory),
        run_id="run",
    )
    memory, make_batch = [], rollouts.batch

    def batch(step, model):
        before = live()
        placed = make_batch(step, model)
        memory.append((sorted([*before, *((array.shape, str(array.dtype)) for array in placed.values())]), live()))
        return placed

    rollouts.batch = batch
    spy = runs.train(trainer, rollouts, model)
    return trainer, rollouts, spy, tracker, directory / "run", memory


def live():
    """Shape and type of every array on the devices."""
    gc.collect()
    return sorted((array.shape, str(array.dtype)) for array in live_arrays())


@pytest.mark.nightly  # in make slow: the command in multiprocess/test_train_grpo.py
def test_a_rollout_is_sampled_once_for_all_of_its_updates(plain):
    trainer, rollouts, spy, tracker, *_ = plain
    assert sorted(spy.found) == [0, 1] and len(spy.losses) == 4
    assert sorted(step for step, values in tracker.scalars.items() if "reward/mean" in values) == [1, 3]
    assert trainer.train_step_traces == 1
    assert {program.traces for program in rollouts.engine.programs.values()} == {1}
    assert rollouts.logprob_traces == {"old_logprobs": 1, "reference_logprobs": 1}
    assert len(rollouts.engine.compilations) == len(rollouts.engine.programs), "nothing was compiled twice"


@pytest.mark.nightly
@pytest.mark.parametrize(("mesh", "blocks", "loss"), [("auto", False, {}), ("2,1,2", True, runs.AHEAD)])
def test_the_engine_and_the_trainer_have_the_same_probabilities(mesh, blocks, loss, monkeypatch):
    """At a temperature, of a model whose vocabulary is padded: with all logits at once, or in blocks on two devices."""
    if blocks:
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", 1)
    tracker, run = runs.Recorder(), {"rollout": {"temperature": 0.7}, "num_iterations": 2}
    padded = tiny.vocab_size() + 32
    spy = runs.train(*runs.make(mesh, steps=1, tracker=tracker, run=run, loss=loss, vocab=padded))
    values, columns = tracker.scalars[1], spy.found[0]
    assert values["train/logprob_gap"] < 1e-5 and values["train/ratio"] == pytest.approx(1, abs=1e-5)
    if loss:
        assert values["train/importance"] == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(columns["old_logprobs"], columns["rollout_logprobs"], atol=1e-4)


@pytest.mark.nightly  # in make slow: multiprocess/test_exact.py
@pytest.mark.parametrize(
    ("mesh", "model", "rollout", "lora"),
    [
        ("2,1,2", tiny.CONFIG, {}, None),
        ("1,2,2", runs.EXPERTS, {}, None),
        ("2,2,1", runs.EXPERTS, {"replay_routing": True}, None),
        ("2,1,2", tiny.CONFIG, {}, LORA),
        ("1,4,1", tiny.CONFIG, {}, LORA),
    ],
)
def test_exact_numerics_leave_no_bit_between_engine_and_trainer(mesh, model, rollout, lora):
    """Ratio 1 and divergence 0 in the first update, as the last bit has it; in the second the policy is another, and in
    the third the next one is sampled.
    """
    tracker, exact = runs.Recorder(), dataclasses.replace(model, numerics="exact")
    spy = runs.train(
        *runs.make(
            mesh,
            steps=3,
            tracker=tracker,
            run={"rollout": {"temperature": 0.7, **rollout}, "num_iterations": 2},
            loss={"use_rollout_logprobs": False, "importance_cap": 2.0, "kl_coefficient": 0.1},
            lora=lora,
            vocab=tiny.vocab_size() + 32,
            model=exact,
            mp="c=bfloat16,p=f32",
            per_device_parallelism=2,
        )
    )
    first, second, third = (tracker.scalars[step] for step in (1, 2, 3))
    assert [first[f"train/{name}"].hex() for name in ("logprob_gap", "ratio_gap", "kl")] == [(0.0).hex()] * 3
    assert [third[f"train/{name}"].hex() for name in ("logprob_gap", "ratio_gap")] == [(0.0).hex()] * 2
    assert model.experts is None or first["train/routing_gap"] == 0
    assert spy.found[0]["old_logprobs"] == spy.found[0]["rollout_logprobs"] == spy.found[0]["reference_logprobs"]
    assert first["train/grad_norm"] > 0 and second["train/ratio_gap"] > 1e-3


@pytest.mark.slow
def test_rows_are_prompts_with_their_answers(plain):
    _, rollouts, spy, *_ = plain
    first = spy.found[0]
    questions = runs.questions()
    for group, question in enumerate(questions.drawn(0, runs.BATCH // runs.GROUP)):
        prompt = list(questions.tokens[question])
        for row in range(group * runs.GROUP, (group + 1) * runs.GROUP):
            assert first["tokens"][row][: len(prompt)] == prompt
            assert not any(first["loss_mask"][row][: len(prompt)]) and first["loss_mask"][row][len(prompt)]
            assert 1 <= sum(first["loss_mask"][row]) <= 8
    assert first["tokens"] != spy.found[1]["tokens"], "another step has other questions and draws"


@pytest.mark.slow
def test_the_trainers_log_probabilities_are_the_engines_and_before_the_first_step_the_references(plain):
    _, _, spy, tracker, *_ = plain
    first, second = spy.found[0], spy.found[1]
    np.testing.assert_allclose(first["old_logprobs"], first["rollout_logprobs"], atol=1e-4)
    np.testing.assert_array_equal(first["old_logprobs"], first["reference_logprobs"])
    np.testing.assert_allclose(second["old_logprobs"], second["rollout_logprobs"], atol=1e-4)
    assert np.abs(np.subtract(second["old_logprobs"], second["reference_logprobs"])).max() > 1e-3
    assert tracker.scalars[1]["train/kl"] == pytest.approx(0, abs=1e-6) and tracker.scalars[3]["train/kl"] > 1e-6
    assert tracker.scalars[1]["train/logprob_gap"] < 1e-4
    assert tracker.scalars[1]["train/importance"] == pytest.approx(1, abs=1e-3)
    # The second update of a rollout is no longer that of the model that sampled it.
    assert tracker.scalars[1]["train/ratio_gap"] == pytest.approx(0, abs=1e-5)
    assert tracker.scalars[2]["train/ratio_gap"] > 1e-3


@pytest.mark.slow
def test_advantages_are_those_of_the_rewards_in_the_rows(plain):
    _, _, spy, tracker, directory, _ = plain
    advantages = np.reshape(spy.found[0]["advantage"], (-1, runs.GROUP))
    np.testing.assert_allclose(advantages.mean(1), 0, atol=1e-6)
    lengths = np.sum(spy.found[0]["loss_mask"], axis=1)
    rows = read_jsonl(directory / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1] * 4 + [3] * 4
    assert [row["rank"] for row in rows] == ["best", "best", "worst", "worst"] * 2
    assert [row.to_dict() for row in tracker.rows] == rows
    for row in rows:
        expected = runs.parity(type("Row", (), row), None) - 0.5 * row["num_tokens"] / 8
        assert row["reward"] == pytest.approx(expected)
    assert rows[0]["reward"] >= rows[1]["reward"] >= rows[2]["reward"] >= rows[3]["reward"]
    assert (
        rows[0]["reward"] == tracker.scalars[1]["reward/max"] and rows[3]["reward"] == tracker.scalars[1]["reward/min"]
    )
    assert tracker.scalars[1]["rollout/answer_length_mean"] == lengths.mean()
    # The whole chain once more, from the texts of the rows of the first rollout.
    totals = []
    for row, mask in zip(spy.found[0]["tokens"], spy.found[0]["loss_mask"], strict=True):
        answer = [token for token, own in zip(row, mask, strict=True) if own]
        text = tiny.tokenizer().decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        totals.append((text.count("e") % 2 == 0) - 0.5 * len(answer) / 8)
    np.testing.assert_allclose(advantages, group_advantages(np.reshape(totals, (-1, runs.GROUP))), atol=1e-5)


@pytest.mark.slow
def test_the_divergence_is_taken_from_the_reward_of_every_answer(monkeypatch):
    """Also from that of one that nothing is learned from, because it was cut: it counts for the others of its group.

    The entropy is that of the whole distribution, in blocks of the vocabulary: as far from the estimate as chance has
    it.
    """
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 1)
    tracker = runs.Recorder()
    loss = {"loss": "rloo", "kl_coefficient": 0.5, "kl_in_reward": True, "entropy_coefficient": 0.01}
    run = {"mask_truncated": True, "rewards": [LengthReward(weight=-0.5)], "rollout": {"stop": ["e"]}}
    spy = runs.train(*runs.make(steps=2, tracker=tracker, loss=loss, run=run))
    columns = {name: np.array(column) for name, column in spy.found[1].items()}
    answers = columns["rollout_logprobs"] != 0
    lengths = answers.sum(axis=1)
    cut = lengths > columns["loss_mask"].sum(axis=1)
    assert cut.any() and not cut.all()
    kl = np.where(answers, columns["rollout_logprobs"] - columns["reference_logprobs"], 0).sum(axis=1)
    rewards = -0.5 * lengths / 8
    total = (rewards - 0.5 * kl).reshape(-1, runs.GROUP)
    others = (total.sum(axis=1, keepdims=True) - total) / (runs.GROUP - 1)
    np.testing.assert_allclose(columns["advantage"].reshape(total.shape), total - others, rtol=1e-4, atol=1e-5)
    assert tracker.scalars[2]["rollout/kl"] == pytest.approx(kl.mean(), rel=1e-5) and abs(kl.mean()) > 1e-4
    assert tracker.scalars[2]["reward/mean"] == pytest.approx(np.mean(rewards)), "the reward itself is shown"
    estimate = -columns["rollout_logprobs"][columns["loss_mask"]].mean()
    assert tracker.scalars[2]["train/entropy"] == pytest.approx(estimate, rel=0.3)


@pytest.mark.slow
def test_figures_of_every_step(plain):
    _, _, _, tracker, *_ = plain
    for step in (1, 2, 3, 4):
        values = tracker.scalars[step]
        assert {"time/update_s", "time/rollout_generate_s", "time/reward_s", "time/inference_eval_s"} <= set(values)
        assert values["time/train/step_avg_last10_s"] > 0 and values["throughput/train/valid_tokens_per_s"] > 0
        assert (values["time/rollout_generate_s"] > 0) == (step in (1, 3))
    for name in ("reward/std", "reward/parity/mean", "reward/length/mean", "rollout/groups_without_signal"):
        assert name in tracker.scalars[1]
    for name in ("entropy", "clipped", "kl", "ratio", "ratio_gap", "logprob_gap", "grad_norm"):
        assert f"train/{name}" in tracker.scalars[1]


@pytest.mark.slow
def test_the_memory_of_a_rollout_is_gone_before_the_update(plain):
    """Live arrays before a batch is made and after it are the same, but for the batch, also where none is sampled."""
    *_, memory = plain
    assert len(memory) == 4
    for expected, found in memory:
        assert found == expected


DONE = collections.defaultdict(threading.Event)
"""Set when so many steps are done."""
EARLY: list[bool] = []
"""For each answer but those of the first rollout, whether its reward began before the update of the step before."""


def patient(row, prompt):
    """A reward that cannot be had before the update of the step before."""
    if row.step > 1:
        EARLY.append(not DONE[row.step - 1].is_set())
        DONE[row.step - 1].wait(20)
    return runs.parity(row, prompt)


def test_the_next_rollout_is_sampled_ahead_by_the_weights_before_the_update():
    asked, rollouts = [], object.__new__(Rollouts)
    sampler = SimpleNamespace(
        sample=lambda number, attempt, model: asked.append((number, model)) or SimpleNamespace(number=number)
    )
    fields, trainer = SimpleNamespace(rollout_ahead=1, updates=2), SimpleNamespace(num_train_steps=6)
    vars(rollouts).update(_ahead=None, _fields=fields, _trainer=trainer, _sampler=sampler)
    assert [rollouts._sampled(number, 0, f"weights {number}").number for number in range(3)] == [0, 1, 2]
    assert asked == [(0, "weights 0"), (1, "weights 0"), (2, "weights 1")]


def test_a_rollout_is_reported_when_its_batch_is_placed_and_nothing_but_the_launch_is_left():
    """The threads that write its rows would take turns with the one that launches the step."""
    calls, rollouts = [], object.__new__(Rollouts)
    packing = SimpleNamespace(place=lambda columns, mesh: calls.append("place"))
    sampled = SimpleNamespace(
        number=0, minibatch=lambda update, size: [0], packing=lambda *_, **__: packing, columns={}
    )

    def roll_out(number, model):
        rollouts._unreported = ("a rollout",)
        return sampled

    vars(rollouts).update(
        _fields=SimpleNamespace(updates=2), _trainer=SimpleNamespace(train_batch_size=1), _roll_out=roll_out,
        _mesh=SimpleNamespace(shape={}), _hosts=SimpleNamespace(is_leader=True), _unreported=None,
        _report=SimpleNamespace(report=calls.append, flush=lambda: calls.append("end")),
    )  # fmt: skip
    for step in range(2):
        rollouts.batch(step, None)
    roll_out(1, None)  # one whose batch is never placed
    rollouts.flush()
    assert calls == ["place", "a rollout", "place", "a rollout", "end"]


@pytest.mark.nightly  # in make slow: multiprocess/test_rollout_ahead.py
def test_rewards_of_a_rollout_ahead_are_computed_while_the_devices_update():
    DONE.clear()
    EARLY.clear()
    tracker = runs.Recorder()
    run = {"rollout_ahead": 1, "rewards": [FunctionReward(function=f"{__name__}:patient")], "reward_workers": 16}
    trainer, rollouts, model = runs.make(steps=3, tracker=tracker, loss=runs.AHEAD, run=run)
    memory, sampled, make_batch = [], [], rollouts.batch

    def batch(step, model):
        before, launched = live(), len(trainer.hosts.ledger.launches)
        placed = make_batch(step, model)
        sampled.append("decode" in trainer.hosts.ledger.launches[launched:])
        batch_bytes = [(array.shape, str(array.dtype)) for array in placed.values()]
        memory.append((sorted([*before, *batch_bytes]), live()))
        return placed

    rollouts.batch = batch

    def done(info):
        # On a busy machine the threads of the rewards may begin late; where they are not ahead, this waits in vain.
        if info.next_step < 3:
            until(lambda: len(EARLY) >= info.next_step * runs.BATCH)
        DONE[info.next_step].set()

    trainer.add_hook(done)
    runs.train(trainer, rollouts, model)
    assert len(EARLY) == 2 * runs.BATCH and all(EARLY)
    assert [tracker.scalars[step]["reward/late"] for step in (1, 2, 3)] == [0, 0, 0]
    # Nothing was sampled before the last step; what is compiled and traced is what it is without.
    assert sampled == [True, True, False] and trainer.train_step_traces == 1
    assert {program.traces for program in rollouts.engine.programs.values()} == {1}
    assert all(expected == found for expected, found in memory), "no cache and no decode weights beside an update"


@pytest.mark.slow
def test_another_seed_draws_other_questions_and_dynamic_sampling_fills_up(plain):
    """With a reward that is the same for many answers, further questions are asked until all groups have a signal."""
    tracker = runs.Recorder()
    trainer, rollouts, model = runs.make(
        steps=1, tracker=tracker, seed=1, run={"rollout": {"max_attempts": 3}, "rewards": runs.fields().rewards[:1]}
    )
    spy = runs.train(trainer, rollouts, model)
    assert spy.found[0]["tokens"] != plain[2].found[0]["tokens"]
    values, advantages = tracker.scalars[1], np.reshape(spy.found[0]["advantage"], (-1, runs.GROUP))
    assert 1 < values["rollout/attempts"] <= 3 and values["rollout/groups_without_signal"] == 0
    assert (np.ptp(advantages, axis=1) > 0).all()


def test_another_engine_samples_where_one_is_given():
    parrot = Parrot()
    _, rollouts, model = runs.make(engine=parrot)
    rollouts.check(model)
    assert rollouts.batch(0, model) is not None and rollouts.engine is parrot
    groups = runs.BATCH // runs.GROUP
    assert parrot.calls == [("check", groups), ("prepare", groups, 7), *(("stream", place) for place in range(groups))]
    columns = rollouts.rollout.columns
    for row in range(runs.BATCH):
        answer = columns["tokens"][row][columns["loss_mask"][row]]
        assert answer.tolist() == [5 + row // runs.GROUP, 5 + row % runs.GROUP]
        assert columns["rollout_logprobs"][row][columns["loss_mask"][row]].tolist() == (2 * (-0.5 - answer)).tolist()


def with_experts(monkeypatch=None, *, steps, loss=None, rollout=None, **run):
    """The scalars of a run of a model with experts; where it may patch, with other experts than the engine chose."""
    if monkeypatch is not None:
        own = RoutedExperts.numbers
        monkeypatch.setattr(RoutedExperts, "numbers", lambda self: np.where(own(self) < 0, -1, (own(self) + 1) % 6))
    tracker, run = runs.Recorder(), {"rollout": rollout or {}, **run}
    runs.train(*runs.make(steps=steps, tracker=tracker, run=run, loss=loss, model=runs.EXPERTS))
    return [
        {name.removeprefix("train/"): value for name, value in tracker.scalars[step].items()}
        for step in range(1, steps + 1)
    ]


@pytest.mark.nightly  # in make slow: unit/engine/test_engine.py
def test_the_engine_routes_as_the_trainer_does_and_experts_that_agree_are_replayed_bit_for_bit(monkeypatch):
    replay = {"replay_routing": True}
    one, other = with_experts(steps=3), with_experts(steps=3, rollout=replay)
    assert one[0]["routing_gap"] == 0 and one[0]["logprob_gap"] < 1e-5
    assert one[0]["router/busiest_share"] > 1 / 6
    names = ("loss", "grad_norm", "routing_gap", "logprob_gap")
    assert [[step[name] for name in names] for step in one] == [[step[name] for name in names] for step in other]
    # The update takes those of the engine, which are others here by one place: the same two of six for few tokens. So
    # do the probabilities before it.
    first, _ = with_experts(monkeypatch, steps=2, loss=runs.AHEAD, rollout=replay, num_iterations=2)
    assert first["routing_gap"] > 0.9 and first["logprob_gap"] > 1e-3
    assert first["ratio_gap"] < 1e-5


def test_replaying_needs_experts():
    with pytest.raises(ConfigError, match=r"rollout.replay_routing is true, and the model has no experts"):
        runs.make(run={"rollout": {"replay_routing": True}})


@pytest.mark.slow
def test_drafts_leave_the_answers_as_they_are_and_say_what_they_saved(monkeypatch):
    """Four rollouts of four of twelve questions: the fourth has answers of an earlier epoch, nearly greedy ones."""
    monkeypatch.setattr(Estimate, "verify_cost", lambda self, width: 1.0)
    found = {}
    for drafts in ("none", "auto"):
        tracker = runs.Recorder()
        rollout = {"drafts": drafts, "temperature": 0.01}
        trainer, rollouts, model = runs.make(steps=4, tracker=tracker, run={"rollout": rollout})
        spy = runs.train(trainer, rollouts, model)
        found[drafts] = [{name: spy.found[i][name] for name in ("tokens", "loss_mask")} for i in range(4)]
        for step in range(1, 5):
            said = {name: value for name, value in tracker.scalars[step].items() if "drafts" in name}
            assert not said if drafts == "none" else said["rollout/drafts/accepted_share"] <= 1
    assert found["none"] == found["auto"]
    assert said["rollout/drafts/steps_saved"] > 0 and said["rollout/drafts/tokens_per_step"] > 1
    assert any(name.startswith("verify_") for name in rollouts.engine.ledger.launches)


def rollouts_with(objective):
    """Rollouts whose loss is given, without a reference model."""
    trainer, _, _ = runs.make()
    return Rollouts(runs.fields(), objective, runs.questions(), tiny.tokenizer(), trainer)


def test_a_reference_goes_with_its_coefficient():
    with pytest.raises(ConfigError, match="kl_coefficient is 0.1 and no reference model is given"):
        rollouts_with(GrpoConfig(kl_coefficient=0.1))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": 0.5}, r"the temperature of the loss is 0\.5 and that of the rollouts is 1\.0: .* Use Grpo"),
        (
            {"vocab_size": None},
            r"the vocab_size of the loss is None and that of the tokenizer is \d+: .* Use GrpoConfig",
        ),
    ],
)
def test_the_policy_that_learns_is_the_one_that_is_sampled(values, text):
    objective = dataclasses.replace(runs.objective_of(runs.fields()), **values)
    with pytest.raises(ConfigError, match=text):
        rollouts_with(objective)


def test_a_checkpoint_of_another_number_of_updates_is_refused():
    _, rollouts, _ = runs.make()
    with pytest.raises(ConfigError, match="a run with 4 updates per rollout .* now there are 1"):
        rollouts.load_state({"updates": 4, "rollout": None})


@pytest.mark.nightly
def test_the_model_learns_what_is_rewarded():
    """From random weights, with a reward that says how many letters e an answer has."""
    tracker = runs.Recorder()
    rewards = [FunctionReward(function="tests.rollouts:letters")]
    trainer, rollouts, model = runs.make(steps=20, tracker=tracker, run={"rewards": rewards})
    runs.train(trainer, rollouts, model)
    means = [tracker.scalars[step]["reward/mean"] for step in range(1, 21)]
    assert np.mean(means[-4:]) > 2 * np.mean(means[:4]), means
