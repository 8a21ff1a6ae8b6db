"""GRPO on conversations, on one process: what is learned from, what is written, and what a failure does."""

import json

import numpy as np
import pytest

from lockstep.errors import ConfigError, PeerError
from lockstep.training.rl.segments import Segment
from tests import environments
from tests import rollouts as runs
from tests.unit.training.rl.parrot import Parrot


def trained(steps=1, **values):
    tracker = runs.Recorder()
    trainer, rollouts, model = runs.make("auto", steps, tracker=tracker, run=environments.run(**values))
    taken = []
    sample = rollouts._sampler.sample
    rollouts._sampler.sample = lambda *given: taken.append(sample(*given)) or taken[-1]
    spy = runs.train(trainer, rollouts, model)
    assert trainer.tracker.flush(60)
    return taken, spy, tracker


@pytest.fixture(scope="module")
def plain():
    return trained()


def test_rows_are_conversations_and_only_what_the_model_said_is_learned_from(plain):
    (sampled, *_), spy, tracker = plain
    columns, row = spy.found[0], 0
    lengths = set()
    for conversation in sampled.conversations:
        spoken = [segment.completion is not None for segment in conversation.segments]
        assert spoken == [False, True] * conversation.turns and 1 <= conversation.turns <= 2
        assert (conversation.turns == 2) or conversation.segments[1].completion.finish_reason == "length"
        tokens = [token for segment in conversation.segments for token in segment.tokens]
        mask = [segment.completion is not None for segment in conversation.segments for _ in segment.tokens]
        assert columns["tokens"][row][: len(tokens)] == tokens and columns["loss_mask"][row][: len(mask)] == mask
        assert not any(columns["loss_mask"][row][len(mask) :])
        lengths.add(len(conversation.segments))
        row += 1
    assert row == runs.BATCH and lengths == {2, 4}, (
        "some conversations have a second turn, and some are cut in the first"
    )
    totals = sampled.rewards.total.reshape(-1, runs.GROUP)
    assert np.sign(np.array(columns["advantage"]).reshape(totals.shape)).tolist() == [
        np.sign(np.round(group - group.mean(), 9)).tolist() for group in totals
    ]


def test_the_trainer_has_the_probabilities_that_tokens_of_every_turn_were_drawn_with(plain):
    _, _, tracker = plain
    assert 0 <= tracker.scalars[1]["train/logprob_gap"] < 1e-5


def test_figures_and_rows_speak_of_conversations(plain):
    (sampled, *_), _, tracker = plain
    values = tracker.scalars[1]
    assert values["rollout/turns_mean"] == np.mean([each.turns for each in sampled.conversations])
    assert values["rollout/prefilled_tokens"] > 0 and values["rollout/prefilled_again_tokens"] == 0
    assert 0 <= values["time/wait_for_environments_s"] < values["time/rollout_generate_s"]
    assert values["reward/mean"] == pytest.approx(sampled.rewards.total.mean())
    assert values["reward/environment/failed"] == values["reward/environment/late"] == 0
    assert values["rollout/generated_tokens"] == sum(len(each.tokens) for each in sampled.completions)
    best, *_, worst = tracker.rows
    assert (best.rank, worst.rank) == ("best", "worst")
    record = json.loads(json.dumps(best.to_record()))
    assert {turn["role"] for turn in record["turns"]} <= {"assistant", "user"} and "turns" not in best.to_dict()
    said = [turn["content"] for turn in record["turns"] if turn["role"] == "assistant"]
    assert record["generated_text"] == "\n".join(said)


@pytest.mark.parametrize(
    ("fails", "kind"), [("raise", "failed"), pytest.param("hang", "late", marks=pytest.mark.slow),
                        pytest.param("reset", "failed", marks=pytest.mark.slow),
                        pytest.param("text", "failed", marks=pytest.mark.slow),
                        pytest.param("sleep", "late", marks=pytest.mark.nightly)],
)  # fmt: skip
def test_an_environment_that_fails_drops_its_group_and_training_goes_on(fails, kind, caplog):
    (sampled, *_), spy, tracker = trained(fails=fails, every=2, timeout_s=20.0 if kind == "failed" else 6.0)
    errors = [each.error for each in sampled.conversations]
    failed = np.array([error is not None for error in errors]).reshape(-1, runs.GROUP)
    assert failed.any() and not failed.all(), "some do, and some do not"
    learned = np.array(spy.found[0]["loss_mask"]).any(axis=1).reshape(failed.shape)
    assert (learned == ~failed.any(axis=1)[:, None]).all() and np.isfinite(spy.losses).all()
    values = tracker.scalars[1]
    assert values[f"reward/environment/{kind}"] == failed.sum() == values["reward/failed"] + values["reward/late"]
    assert values["rollout/groups_dropped"] == failed.any(axis=1).mean()
    assert "the environment of question" in caplog.text and "nothing is learned from the answers to it" in caplog.text
    if fails == "reset":  # none of it began: the row is its question
        empty = int(failed.argmax())
        assert not sampled.conversations[empty].segments
        question = runs.questions().tokens[sampled.conversations[empty].question]
        assert tuple(spy.found[0]["tokens"][empty][: len(question)]) == Segment(tokens=question).tokens


@pytest.mark.parametrize(
    ("fails", "fault", "text"),
    [
        pytest.param(
            "reset",
            False,
            r"ConfigError: .* all 16 conversations .* OSError: no such world \(environments\.py, line 27\)\. Correct",
            marks=pytest.mark.slow,  # a server that is down takes the same way out
        ),
        ("outage", True, r"HostTimeoutError: .* ConnectionError: .* Check its server, or raise environment.timeout_s"),
    ],
)
def test_an_environment_that_has_never_worked_ends_the_run(fails, fault, text):
    with pytest.raises(PeerError, match=text) as error:
        trained(fails=fails, every=1)
    assert error.value.fault == fault, "another try may meet a server that answers"


def test_another_engine_is_refused():
    with pytest.raises(ConfigError, match="an environment and an engine of the class Parrot are given"):
        runs.make("auto", 1, run=environments.run(), engine=Parrot())


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rewards": runs.fields().rewards}, "environment and rewards are both given"),
        ({"rollout_ahead": 1}, "rollout_ahead is 1 and an environment is given"),
        ({"rollout": {"drafts": "auto"}}, "rollout.drafts is auto and an environment is given"),
        ({"environment": environments.Parity(timeout_s=1e6)}, "environment.timeout_s is 1e.06 and hosts wait"),
    ],
)
def test_what_does_not_go_with_an_environment(values, text):
    fields = runs.fields(**{**environments.run(), **values})
    with pytest.raises(ConfigError, match=text):
        fields.check_run(runs.BATCH, 300.0, 2.0)
