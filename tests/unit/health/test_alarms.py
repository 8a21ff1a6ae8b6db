"""Alarms: how often they speak where nothing has changed, how soon of what has, and what they say."""

import json

import numpy as np
import pytest

from benchmarks.false_alarms import KINDS, SIZES, SimulatedRun, alarmed_rounds
from lockstep.health import Alarms, PromptStates
from lockstep.health import alarms as module
from lockstep.health.alarms import WARM_UP


def round_of(looping, size=32, answers=1, state="loop", groups=lambda place: ()):
    """A round in which the first prompts have a state."""
    return [
        PromptStates(prompt=str(i), answers=[{state} if i < looping else set()] * answers, groups=groups(i))
        for i in range(size)
    ]


def fed(counts, alarms=None, every=50, **round_arguments):
    """The alarms of rounds with so many prompts in the state, each round's by its step."""
    alarms = alarms or Alarms(["loop", "cut"], warm_up=0, usual=["cut"])
    return {i * every: alarms.add(i * every, round_of(n, **round_arguments)) for i, n in enumerate(counts)}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("greedy", "wandering"))) for kind in KINDS]
)
def test_false_alarms_are_no_more_frequent_than_chosen(kind):
    # At a rate of one in five, so that few rounds tell; 4 standard deviations above it, the draws are always the same.
    rate, rounds = 0.2, 32
    runs = [SimulatedRun(kind=kind, prompts=prompts, answers=answers, seed=0) for prompts, answers in SIZES[:3]]
    alarmed = [len(alarmed_rounds(run, rounds, rate)) for run in runs]
    total = len(runs) * rounds
    assert sum(alarmed) <= total * rate + 4 * (total * rate * (1 - rate)) ** 0.5, alarmed


def test_a_healthy_run_may_double_its_odds_and_the_test_would_see_more(monkeypatch):
    def alarmed():
        runs = [SimulatedRun(kind="new", prompts=32, answers=4, seed=i, odds=2, changed=12) for i in range(6)]
        return sum(bool(alarmed_rounds(run, 16)) for run in runs)

    assert alarmed() == 0
    monkeypatch.setattr(module, "ODDS", 1.0)
    assert alarmed() >= 3


def test_few_differences_are_worth_the_exact_test(monkeypatch):
    tails = []
    monkeypatch.setattr(module, "fisher_tail", lambda *samples: tails.append(samples) or 1.0)
    alarmed_rounds(SimulatedRun(kind="drawn", prompts=64, answers=4, seed=0), 32)
    assert 10 <= len(tails) <= 100, "of 21,970 pairs of samples"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompts", "answers"), [(32, 1), (16, 8), (128, 1)])
def test_a_state_that_comes_is_told_within_two_rounds(kind, prompts, answers):
    for seed in range(3):
        healthy = SimulatedRun(kind=kind, prompts=prompts, answers=answers, seed=seed).rounds()
        alarms = Alarms(["loop"], warm_up=0)
        for number, states in zip(range(10), healthy, strict=False):
            assert not alarms.add(number, states)
        random = np.random.default_rng(seed)
        broken = [
            PromptStates(prompt=x.prompt, answers=[{"loop"} if random.random() < 0.77 else set() for _ in x.answers])
            for x in states
        ]
        told = alarms.add(10, broken) or alarms.add(11, broken)
        assert [(alarm.state, alarm.began) for alarm in told] == [("loop", 10)]


def test_answers_that_are_the_same_in_every_round_are_no_further_evidence():
    # 7 of 32 have it, by chance or not; then the model does not change for 200 rounds.
    assert not any(fed([3, 2, 4, 3, *[7] * 200]).values())
    assert not any(fed([1, *[6] * 200], size=8).values())


def test_many_answers_to_few_prompts_count_as_few():
    assert not any(fed([0, 0, 0, 1, 1, 1], size=3, answers=64).values())
    counts = [round_of(0, size=3, answers=64)] * 4
    alarms = Alarms(["loop"], warm_up=0)
    spread = [PromptStates(prompt=str(i), answers=[{"loop"}, set()] * 32) for i in range(3)]
    assert [alarms.add(step, states) for step, states in enumerate(counts)] == [[]] * 4
    assert alarms.add(9, spread)  # each prompt's answers differ from each other: they are draws of their own


def test_a_state_that_comes_by_and_by_is_told():
    told = {step: alarms for step, alarms in fed([1] * 12 + [3, 6, 9, 12, 15, 18, 21, 24]).items() if alarms}
    assert 700 <= min(told) <= 850 and len(told) == 1
    (alarm,) = told[min(told)]
    assert 600 <= alarm.began <= alarm.step


@pytest.mark.parametrize(
    ("counts", "told"), [([0, 1, 1, 4, 11, 18, 16, 18], 5), ([0, 0, 4, 11, 18, 18], 4), ([0, 4, 11, 18, 25, 30], 3)]
)
def test_a_state_that_comes_by_and_by_from_the_first_rounds_on_is_told_within_two_of_an_eighth(counts, told):
    # Found by benchmarks/spoiled_runs.py: half of the rows of a fine-tuning repeat their text.
    assert [step for step, alarms in fed(counts, every=1).items() if alarms] == [told]
    assert counts[told - 2] >= 32 / 8


def test_new_prompts_in_each_round_are_further_evidence_of_a_bad_beginning():
    alarms = Alarms(["loop", *map(str, range(9))], warm_up=0)
    rounds = [
        [PromptStates(prompt=f"{step} {i}", answers=[{"loop"}] * 8) for i in range(8)]  # a rollout of 8 questions
        for step in range(1, 4)
    ]
    assert [len(alarms.add(step, states)) for step, states in enumerate(rounds, start=1)] == [0, 1, 0]
    same = [PromptStates(prompt=str(i), answers=[{"loop"}] * 8) for i in range(8)]
    alarms = Alarms(["loop", *map(str, range(9))], warm_up=0)
    assert not any(alarms.add(step, same) for step in range(1, 9)), "8 prompts could all be hard ones"


def test_an_improvement_is_no_alarm():
    assert not any(fed([32, 30, 24, 12, 6, 2, 0, 0, 0], Alarms(["loop"])).values())
    assert not any(fed([32, 30, 24, 12, 6, 2, 0, 0, 0], Alarms(["loop"], warm_up=0)).values())


def test_a_model_that_learns_from_nothing_may_begin_badly():
    counts = [0, 32, 32, 20, 3, 1, 0, 1, 0, 0, 1, 0]
    assert len(counts) > WARM_UP
    assert not any(fed(counts, Alarms(["loop"])).values())
    late = fed([*counts, 25], Alarms(["loop"]))
    assert [alarm.began for alarm in late[600]] == [600]


def test_a_trained_model_that_is_bad_from_the_first_round_on_is_told_in_the_second():
    told = {step: alarms for step, alarms in fed([25, 25, 26, 25], Alarms(["loop"], warm_up=0)).items() if alarms}
    assert list(told) == [100]  # step 0 is the model as it was given
    (alarm,) = told[100]
    assert alarm.before is None and alarm.began == 0 and "; since the first round, step 0" in str(alarm)
    assert not any(fed([25] * 30, Alarms(["loop"])).values())
    assert not any(fed([30, 25, 20, 14, 5], Alarms(["loop"], warm_up=0)).values()), "it fades"
    assert not any(fed([25] * 9, Alarms(["cut"], warm_up=0, usual=["cut"]), state="cut").values())


def test_an_alarm_is_told_once_and_again_when_the_state_has_gone_and_come_back():
    counts = [0] * 8 + [24] * 20 + [1] * 4 + [24] * 4
    alarms = Alarms(["loop", "cut"], warm_up=0)
    told = fed(counts, alarms)
    assert [step for step, own in told.items() if own] == [8 * 50, 32 * 50]
    assert alarms.lasting["loop"].began == 32 * 50
    assert told[32 * 50][0].before.value < 0.05, "the rounds of the first time are no reference"


def test_one_better_round_ends_no_alarm():
    alarms = Alarms(["loop"], warm_up=0)
    told = fed([1] * 8 + [24] * 60 + [8] + [24] * 9, alarms)
    assert [step for step, own in told.items() if own] == [8 * 50] and alarms.lasting


def test_the_group_is_named_that_tells():
    def groups(place):
        return ("code" if place % 4 == 0 else "no code", f"turns {place % 2}")

    alarms = Alarms(["loop"], warm_up=0)
    for step in range(6):
        assert not alarms.add(step, round_of(1, size=64, groups=groups))
    looping = {i for i in range(0, 64, 4) if i % 16} | {1, 2}
    broken = [
        PromptStates(prompt=str(i), answers=[{"loop"} if i in looping else ()], groups=groups(i)) for i in range(64)
    ]
    (alarm,) = alarms.add(6, broken)
    assert alarm.group == "code" and (alarm.inside.percent, alarm.outside.percent) == ("75 %", "4.2 %")
    assert "; code 75 %, others 4.2 %; since step 6" in str(alarm)
    assert set(alarm.prompts) <= {str(i) for i in range(0, 64, 4)} and len(alarm.prompts) == 10
    (alarm,) = fed([0] * 6 + [24], groups=groups)[300]
    assert alarm.group == ""


def test_a_state_in_a_small_group_alone_is_told():
    def groups(place):
        return ("code",) if place < 12 else ("no code",)

    told = fed([1] * 10 + [10], size=256, groups=groups)[500]
    assert [(alarm.group, alarm.inside.count, alarm.inside.total) for alarm in told] == [("code", 10, 12)]


def test_it_goes_on_from_its_records_as_if_it_had_not_ended():
    def all_rounds():
        random = np.random.default_rng(3)
        for step in range(70):
            share = 0.6 if 40 <= step < 50 or step >= 62 else 0.05
            asked = random.permutation(60)[:32]
            yield (
                step,
                [
                    PromptStates(
                        prompt=str(i),
                        answers=[{"loop"} if random.random() < share else set() for _ in range(2)],
                        groups=("code",) if i % 3 else (),
                    )
                    for i in asked
                ],
            )

    whole, told, records = Alarms(["loop"], warm_up=0), {}, []
    for step, states in all_rounds():
        told[step] = whole.add(step, states)
        records.append((step, json.loads(json.dumps(whole.record()))))
    assert sum(map(len, told.values())) == 2
    for end in (1, 41, 43, 55, 63):
        second = Alarms(["loop"], warm_up=0)
        for step, record in records[max(0, end - 2 * module.KEPT) : end]:
            second.resume(step, record)
        rest = {step: second.add(step, states) for step, states in all_rounds() if step >= end}
        assert rest == {step: told[step] for step in rest}, end


def test_a_run_that_goes_back_forgets_what_came_after():
    alarms = Alarms(["loop"], warm_up=0)
    first = fed([0] * 8 + [24, 24], alarms)
    assert first[400] and alarms.lasting
    again = {step: alarms.add(step, round_of(24)) for step in (350, 400)}
    assert again[350][0].began == 350 and not again[400]
    assert alarms.add(50, round_of(0)) == [] and not alarms.lasting


@pytest.mark.parametrize("damage", [{"prompts": [1]}, {"groups": []}, {"answers": [1, 2]}, {"lasting": [{}]}])
def test_a_record_that_is_none_is_refused(damage):
    alarms = Alarms(["loop"])
    alarms.add(0, round_of(3))
    with pytest.raises((TypeError, ValueError, AttributeError)):
        Alarms(["loop"]).resume(0, alarms.record() | damage)
