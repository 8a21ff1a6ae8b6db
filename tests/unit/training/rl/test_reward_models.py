"""Reward models: the scores of transformers, on a mesh, and answers that they cannot read."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import ConfigError, PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.placement import make_mesh
from lockstep.text import Prompt
from lockstep.training import TrainerConfig
from lockstep.training.rl.reward_models import ModelReward, RewardModel
from lockstep.training.step.programs import Programs
from tests import rollouts as runs
from tests import tiny
from tests.unit.report.made_up import row

GOLDEN = Path(__file__).parents[3] / "golden" / "reward_model"


@pytest.fixture
def checkpoint(tmp_path):
    """The classifier with the demo's tokenizer."""
    shutil.copytree(GOLDEN, tmp_path / "reward", ignore=shutil.ignore_patterns("*.npz"))
    tiny.tokenizer().save_pretrained(tmp_path / "reward")
    return str(tmp_path / "reward")


def load(checkpoint, mesh_shape="auto", **values):
    hosts, mesh = Hosts(MemoryClient.hub(1)[0]), make_mesh(mesh_shape)
    trainer = TrainerConfig(train_batch_size=8 * mesh.size, per_device_parallelism=4, mp="f32")
    return RewardModel.load("judge", ModelReward(model=checkpoint, **values), trainer, Programs(hosts, mesh)), hosts


def test_a_limit_below_a_token_of_question_and_of_answer_is_refused():
    with pytest.raises(ConfigError, match=r"model\.max_seq_len is 1; it must be at least 2"):
        ModelReward(model="judge", max_seq_len=1)
    assert ModelReward(model="judge", max_seq_len=2).max_seq_len == 2


class Given(RewardModel):
    """A reward model that is given tokens in place of texts."""

    def tokens(self, row, prompt):
        return row


@pytest.mark.parametrize("mesh_shape", ["auto", "1,-1,2"])
def test_scores_are_those_of_transformers(checkpoint, mesh_shape):
    model, hosts = load(checkpoint, mesh_shape, max_seq_len=16)
    golden = np.load(GOLDEN / "scores.npz")
    rows = [tokens[:length].tolist() for tokens, length in zip(golden["tokens"], golden["lengths"], strict=True)]
    count = 8 * len(model.sharding.mesh.devices.flat)
    answers = [(rows[number % len(rows)] if number % 7 else None, None) for number in range(count)]
    given = Given(**{name: getattr(model, name) for name in model.__dataclass_fields__})
    found = given.scores(hosts, answers)
    expected = [float(golden["scores"][number % len(rows)]) if number % 7 else None for number in range(count)]
    assert [value is None for value in found] == [value is None for value in expected]
    np.testing.assert_allclose(
        [value for value in found if value is not None], [value for value in expected if value is not None], atol=2e-5
    )
    assert model.program.traces == 1


QUESTION = Prompt(id=0, messages=({"role": "user", "content": "What is two plus two?"},))


def test_it_reads_question_and_answer_through_its_own_chat_template(checkpoint):
    model, _ = load(checkpoint, max_seq_len=32)
    chat = [*QUESTION.messages, {"role": "assistant", "content": "four"}]
    expected = tiny.tokenizer().apply_chat_template(chat, tokenize=False)
    assert model.tokens(row("four"), QUESTION) == tiny.tokenizer()(expected, add_special_tokens=False)["input_ids"]
    text = Prompt(id=0, text="two plus two is")
    assert (
        model.tokens(row(" four"), text)
        == tiny.tokenizer()("two plus two is four", add_special_tokens=False)["input_ids"]
    )
    assert model.tokens(row("four " * 32), QUESTION) is None, "it does not fit"


@pytest.mark.slow
def test_a_run_learns_from_its_scores(checkpoint):
    """The only component; the rewards of a rollout are its scores, an answer that does not fit has the default."""
    tracker = runs.Recorder()
    reward = ModelReward(model=checkpoint, max_seq_len=24, default=-3.0, weight=2.0)
    trainer, rollouts, model = runs.make("auto", 2, tracker=tracker, run={"rewards": [reward]})
    spy = runs.train(trainer, rollouts, model)
    figures = tracker.scalars[1]
    assert figures["reward/mean"] == pytest.approx(2 * figures["reward/model/mean"])
    assert np.ptp(spy.found[0]["advantage"]) > 0 and figures["reward/model/late"] == 0


def test_longer_rows_than_its_own_are_refused(checkpoint):
    with pytest.raises(PeerError, match="judge.max_seq_len is 512, and .* of 256 tokens. Lower it to at most 256"):
        load(checkpoint, max_seq_len=512)
