"""What a sampling is without its devices: its questions, and the answers that an earlier process has sampled."""

import json
import types

import numpy as np

from lockstep.hosts import Ledger
from lockstep.models import read_decoder
from lockstep.training.rl import rollout_sampler
from lockstep.training.rl.groups import Sampled
from lockstep.types import Drafts
from tests import rollouts as runs
from tests import tiny
from tests.unit.training.rl.made_up import completion


def test_answers_of_an_earlier_process_get_their_rewards_again():
    _, rollouts, _ = runs.make(loss=runs.AHEAD, run={"rollout_ahead": 1, "num_iterations": 2})
    sampler = rollouts._sampler
    assert sampler.n_questions == runs.BATCH // runs.GROUP and sampler.learned_at(3) == 7
    tokens = tiny.tokenizer().encode("three apples, eleven pears")
    answers = [
        completion(place, generation, tokens[: 1 + generation])
        for place in range(sampler.n_questions)
        for generation in range(runs.GROUP)
    ]
    scoring = rollouts._rewarder.begin()
    kept = Sampled(number=3, questions=[4, 0, 1, 2], completions=answers, scoring=scoring).to_json()
    scoring.close()
    resumed = sampler.resumed(json.loads(json.dumps(kept)))
    groups = rollouts._rewarded(resumed)
    assert groups.questions.tolist() == [4, 0, 1, 2] and groups.completions == answers
    texts = [tiny.tokenizer().decode(answer.tokens) for answer in answers]
    expected = [
        (text.count("e") % 2 == 0) - 0.5 * len(a.tokens) / runs.NEW for text, a in zip(texts, answers, strict=True)
    ]
    np.testing.assert_allclose(groups.rewards.total, expected)


class Asked:
    """An engine that answers everything in the same way, and notes what it was asked."""

    def __init__(self):
        self.ledger, self.requests, self.prepared = Ledger(), [], []

    def free_bytes(self, model):
        return 1

    def check(self, model, requests):
        raise AssertionError("these tests begin after the check")

    def prepare(self, model, requests, *, free):
        self.prepared.append(requests)
        return {}

    def stream(self, model, requests, **_):
        self.requests.append(requests)
        for request in requests:
            answers = [answer_of(request, generation) for generation in range(runs.GROUP)]
            yield [completion(request.prompt_id, generation, answer) for generation, answer in enumerate(answers)]


def answer_of(request, generation):
    return request.prompt_tokens[-1 - generation :]


def test_the_answers_of_the_last_epoch_are_drafts(monkeypatch):
    _, rollouts, model = runs.make(run={"rollout": {"drafts": "last_round"}})
    sampler, engine = rollouts._sampler, Asked()
    monkeypatch.setattr(sampler, "_engine_for", lambda model: (engine, read_decoder(model)))
    known = {}
    for number in range(4):  # 12 questions, 4 in a rollout: the fourth begins the second epoch
        sampled = sampler.sample(number, 0, model)
        sampled.scoring.close()
        for question, request in zip(sampled.questions, engine.requests[-1], strict=True):
            assert request.drafts == Drafts(answers=known.get(question, ()))
            known[question] = tuple(tuple(answer_of(request, generation)) for generation in range(runs.GROUP))
    assert all(request.drafts.answers for request in engine.requests[3])
    assert all(request.drafts is not None for request in engine.prepared[0]), "compiled before the first draft"


def test_a_rollout_that_is_ended_leaves_no_drafts(monkeypatch):
    """The checkpoint then has those of before, and all attempts are sampled again with them."""
    _, rollouts, model = runs.make(run={"rollout": {"drafts": "last_round"}})
    sampler, engine = rollouts._sampler, Asked()
    monkeypatch.setattr(sampler, "_engine_for", lambda model: (engine, read_decoder(model)))
    sampler.sample(0, 0, model).scoring.close()
    before = rollouts.state()["drafts"]
    sampler.sample(1, 0, model).scoring.close()
    assert rollouts.state()["drafts"] != before
    monkeypatch.setattr(
        rollout_sampler, "generate_on_all", lambda *args, **options: types.SimpleNamespace(ended=True)
    )  # asked to end
    assert sampler.sample(1, 1, model) is None
    assert rollouts.state()["drafts"] == before


def test_a_run_that_goes_on_has_the_drafts_of_the_one_before(monkeypatch):
    _, rollouts, model = runs.make(run={"rollout": {"drafts": "last_round"}})
    monkeypatch.setattr(rollouts._sampler, "_engine_for", lambda model: (Asked(), read_decoder(model)))
    for number in range(4):  # in the fourth, answers are compared with those of the first
        rollouts._sampler.sample(number, 0, model).scoring.close()
    state = json.loads(json.dumps(rollouts.state()))
    _, later, _ = runs.make(run={"rollout": {"drafts": "last_round"}})
    later.load_state(state)
    found = [each._sampler.earlier.drafts(question) for question in range(12) for each in (rollouts, later)]
    assert found[::2] == found[1::2] and all(each.answers for each in found) and any(each.compared for each in found)
