"""What a sampling is without its devices: its questions, and the answers that an earlier process has sampled."""

import json

import numpy as np

from lockstep.training.grpo.sampled import Sampled
from tests import rollouts as runs
from tests import tiny
from tests.unit.training.grpo.made_up import completion


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
