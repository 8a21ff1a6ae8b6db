"""Rewards over several hosts, each with its share of the answers."""

import time

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training.grpo.rewarding import Rewarder
from lockstep.training.grpo.rewards import FunctionReward, LengthReward
from tests.multiprocess.harness import run_threads
from tests.unit.training.grpo.made_up import prompt, row

ANSWERS = 8


def picky(answer, question):
    """Fails for one answer, hangs for another, and gives no number for a third."""
    if answer.num_tokens == 3:
        raise RuntimeError("no opinion")
    if answer.num_tokens == 4:
        time.sleep(5)
    return None if answer.num_tokens == 6 else 1.0


def make(timeout_s=0.5, **values):
    rewards = [FunctionReward(function=f"{__name__}:picky", default=-1.0, **values), LengthReward(weight=0.5)]
    return Rewarder(rewards, max_new_tokens=10, workers=4, timeout_s=timeout_s)


def rewarded(hosts):
    rewarder = make(weight=2.0)
    scoring = rewarder.begin()
    for number in range(hosts.index, ANSWERS, hosts.count):
        scoring.submit(number, row("", num_tokens=number), prompt())
    with hosts.scope("rollout") as scope:
        found = rewarder.finish(scope, scoring, ANSWERS)
    return found.total.tolist(), found.components["picky"].tolist(), found.failed, found.late


@pytest.mark.parametrize("count", [1, 3])
def test_every_host_gets_the_weighted_sums_of_all_answers(count, caplog):
    picky_values = [1, 1, 1, -1, -1, 1, -1, 1]
    expected = (2.0 * np.array(picky_values) + 0.5 * np.arange(ANSWERS) / 10).tolist()
    for total, values, failed, late in run_threads(rewarded, count):
        assert total == pytest.approx(expected) and values == picky_values
        assert failed == {"picky": 2, "length": 0} and late == {"picky": 1, "length": 0}
    assert "reward picky failed on process" in caplog.text and "its default is used" in caplog.text


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [(3, "RuntimeError: no opinion"), (4, "took more than 0.5 s"), (6, "returned None, which is not a number")],
)
def test_a_reward_that_cannot_work_is_found_before_training(num_tokens, text):
    with pytest.raises(ConfigError, match=rf"picky was tried on the reference answer .*{text}.* a finite number"):
        make().check(row("18", num_tokens=num_tokens), prompt())
    make().check(row("18", num_tokens=1), prompt())
