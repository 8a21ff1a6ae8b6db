"""An alarm as one line, and by way of JSON."""

import dataclasses
import json

import pytest

from lockstep.health import Alarm, PromptStates, Share

BEFORE, NOW = Share(count=8, total=256), Share(count=24, total=32)
ALARM = Alarm(step=6250, state="loop", began=6200, before=BEFORE, now=NOW, prompts=("3", "7"))


def test_an_alarm_is_one_line():
    assert str(ALARM) == (
        "step 6,250: loop in 24 of 32 answers (75 %), before in 8 of 256 answers (3.1 %); since step 6,200"
    )
    inside, outside = Share(count=10, total=13), Share(count=0, total=27)
    assert "(3.1 %); code 77 %, others 0 %; since" in str(
        dataclasses.replace(ALARM, group="code", inside=inside, outside=outside)
    )
    first = str(dataclasses.replace(ALARM, before=None))
    assert first == "step 6,250: loop in 24 of 32 answers (75 %); since the first round, step 6,200"


@pytest.mark.parametrize("change", [{}, {"before": None}, {"group": "code", "inside": NOW, "outside": BEFORE}])
def test_an_alarm_is_the_same_by_way_of_json(change):
    alarm = dataclasses.replace(ALARM, **change)
    assert Alarm.from_dict(json.loads(json.dumps(dataclasses.asdict(alarm)))) == alarm


def test_the_share_of_a_prompts_answers():
    prompt = PromptStates(prompt="3", answers=[["loop", "cut"], [], ["cut"], ()])
    assert (prompt.count("cut"), prompt.share("cut"), prompt.share("empty")) == (2, 0.5, 0.0)
