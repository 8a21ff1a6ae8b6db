"""Consequences of alarms: the line, the file, the alert, the stop, and that nothing is told twice a day."""

import dataclasses
import json
import sys
import types

import pytest

from lockstep.errors import ConfigError
from lockstep.health import AnsweredPrompt, Vocabulary, measure_round
from lockstep.report import HEALTH_FILE, AlarmLog, AlarmsConfig, drop_later, read_jsonl
from lockstep.report.alarm_log import ONCE_IN_S, prompt_states
from lockstep.report.trackers import NoopTracker
from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason
from tests.snippets import lacking

CODE = "```python\nx = 1\n```\nExplain this."
SECRET = "see https://me:hunter2hunter2hunter2@host/x?token=hunter2 "


def answer(number, text, generation=0, code=False):
    return AnsweredPrompt(
        prompt=Prompt(id=number, text=CODE if code else "Who was Ada Lovelace?"),
        completion=Completion(
            prompt_id=number,
            generation_id=generation,
            tokens=tuple(range(100 + number, 140 + number)),
            logprobs=(-1.0,) * 40,
            finish_reason=FinishReason.STOP,
        ),
        text=text,
    )


def round_of(empty, size=32, text=" \n", code=lambda number: False):
    """A round in which the first answers are empty."""
    return [
        answer(number, text if number < empty else f"She wrote program {number}.", code=code(number))
        for number in range(size)
    ]


class Alerts(NoopTracker):
    def __init__(self):
        self.alerts = []

    def alert(self, *, title, text, step):
        self.alerts.append((title, text, step))


class Runs:
    """Rounds of a run, which may end and go on."""

    def __init__(self, directory, tracker=None, clock=lambda: 0.0, **config):
        self.arguments = AlarmsConfig(**{"warm_up": 0} | config), "inference_eval", tracker or NoopTracker(), directory
        self.clock = clock
        self.restart()

    def restart(self):
        self.log = AlarmLog(*self.arguments, clock=lambda: self.clock())
        return self

    def feed(self, first, counts, **options):
        for step, count in enumerate(counts, start=first):
            self.add(step, round_of(count, **options))

    def add(self, step, answers):
        self.log.add(step, answers, measure_round(answers, Vocabulary()))


def lines(caplog):
    """The alarms in the log."""
    return [record.getMessage() for record in caplog.records if record.name == "lockstep.report.alarm_log"]


def test_an_alarm_is_one_line_with_step_state_shares_group_and_example(tmp_path, caplog):
    tracker = Alerts()
    run = Runs(tmp_path, tracker)
    run.feed(1, [0] * 6 + [24, 24], code=lambda number: number < 26)
    (line,) = lines(caplog)
    assert line == (
        "inference_eval: step 7: empty in 24 of 32 answers (75 %), before in 0 of 192 answers (0 %); code 92 %, "
        'others 0 %; since step 7; such as prompt 0: "↵"'
    )
    assert tracker.alerts == [("inference_eval: empty", line.removeprefix("inference_eval: "), 7)]
    assert run.log.stop_reason is None
    records = read_jsonl(tmp_path / HEALTH_FILE)
    assert [record["step"] for record in records if "round" in record] == list(range(1, 9))
    (alarm,) = (record for record in records if "alarm" in record)
    assert (alarm["name"], alarm["step"], alarm["line"]) == ("inference_eval", 7, tracker.alerts[0][1])
    assert alarm["alarm"]["state"] == "empty" and alarm["alarm"]["group"] == "code"


def test_the_page_shows_an_alarm_as_it_is(tmp_path, caplog):
    run = Runs(tmp_path)
    looping = {*range(10), *range(13, 17)}
    for step in range(4000, 6500, 250):
        bad = looping if step == 6250 else {20}
        answers = [answer(n, "Sure. !!!!!!!!" if n in bad else f"It is {n}.", code=n < 13) for n in range(40)]
        for place, own in enumerate(answers):
            if place in bad:
                looped = dataclasses.replace(own.completion, tokens=(1, 2, *[3] * 38))
                answers[place] = dataclasses.replace(own, completion=looped)
        run.add(step, answers)
    (line,) = (line for line in lines(caplog) if ": loop in" in line)
    assert not lacking("docs/health.md:text:0", line.removeprefix("inference_eval: "))


def test_what_a_model_says_is_shown_without_control_characters_secrets_and_its_middle(tmp_path, caplog):
    tracker = Alerts()
    text = f"<|im_start|>\x1b]0;title\x07\n{SECRET}{'word ' * 99}the end"
    Runs(tmp_path, tracker).feed(1, [0] * 6 + [30], text=text)
    (line,), ((_, alert, _),) = lines(caplog), tracker.alerts
    for shown in (line, alert):
        assert "special_token" in shown and shown.isprintable() and "hunter2" not in shown and len(shown) < 400
        assert "<|im_start|>" in shown and shown.endswith('the end"')


def test_the_same_is_told_once_a_day_whatever_the_run_does(tmp_path, caplog):
    tracker, clock = Alerts(), types.SimpleNamespace(now=1e9)
    run = Runs(tmp_path, tracker, lambda: clock.now)
    run.feed(1, [0] * 6 + [24, 24])
    run.feed(9, [0, 0, 24])  # it went and came back
    run.restart().feed(12, [0, 0, 24])
    drop_later(tmp_path / HEALTH_FILE, 4)  # the run goes on from a checkpoint
    run.restart().feed(5, [0, 0, 24])
    assert len(lines(caplog)) == len(tracker.alerts) == 1
    assert [record["step"] for record in read_jsonl(tmp_path / HEALTH_FILE) if "alarm" in record] == [7]
    clock.now += ONCE_IN_S
    run.restart().feed(8, [0, 0, 24])
    assert [alert[2] for alert in tracker.alerts] == [7, 10]
    run.feed(11, [0, 0, 24])
    assert len(tracker.alerts) == 2


def test_a_state_is_told_though_another_was_told_today(tmp_path, caplog):
    run = Runs(tmp_path)
    run.feed(1, [0] * 6 + [24])
    run.feed(8, [0, 0, 24], text="<|im_start|>")
    assert [line.split(": ")[2].split()[0] for line in lines(caplog)] == ["empty", "special_token"]


def test_a_run_that_goes_on_compares_with_the_rounds_before(tmp_path, caplog):
    run = Runs(tmp_path)
    run.feed(1, [0] * 6)
    run.restart().feed(7, [24])
    assert "before in 0 of 192 answers" in lines(caplog)[0]
    run.restart().feed(8, [24] * 3)
    assert len(lines(caplog)) == 1
    caplog.clear()
    run.restart().feed(4, [0, 24])  # a loop of the user's own, whose files are not taken back
    assert "before in 0 of 128 answers" not in "".join(lines(caplog)), "told today"
    last = [record for record in read_jsonl(tmp_path / HEALTH_FILE) if "alarm" in record][-1]
    assert last["step"] == 5 and last["alarm"]["before"] == {"count": 0, "total": 128}


@pytest.mark.parametrize(
    "content", ['{"name": "inference_eval", "step": 1, "round": {}}\n', "no json\n{}\n", "[]\n{}\n"]
)
def test_a_damaged_file_is_named_and_alarms_begin_anew(tmp_path, caplog, content):
    (tmp_path / HEALTH_FILE).write_text(content)
    run = Runs(tmp_path)
    run.feed(5, [0] * 6 + [24])
    first, second = lines(caplog)
    assert f"{HEALTH_FILE} cannot be read, and alarms begin anew" in first and "before in 0 of 192" in second


def test_without_a_directory_alarms_are_told_and_nothing_is_kept(caplog):
    Runs(None).feed(1, [0] * 6 + [24])
    assert len(lines(caplog)) == 1


def test_two_names_share_a_file(tmp_path, caplog):
    first, second = Runs(tmp_path), Runs(tmp_path)
    second.arguments = (second.arguments[0], "rollout", *second.arguments[2:])
    for run in (first, second):
        run.restart().feed(1, [0] * 6)
    for run in (first, second):
        run.restart().feed(7, [24])
    assert [line.partition(":")[0] for line in lines(caplog)] == ["inference_eval", "rollout"]


def test_stop_asks_for_the_end(tmp_path, caplog):
    run = Runs(tmp_path, on_alarm="stop")
    run.feed(1, [0] * 6)
    assert run.log.stop_reason is None
    run.feed(7, [24])
    assert run.log.stop_reason == lines(caplog)[0]
    assert run.restart().log.stop_reason is None
    run.feed(8, [24])
    assert run.log.stop_reason is None, "whoever starts it again after a stop wants it to go on"


@pytest.mark.parametrize(("returned", "stops"), [(None, False), (True, True)])
def test_a_function_gets_the_alarm_and_may_end_the_run(tmp_path, monkeypatch, returned, stops):
    alarms = []
    module = types.SimpleNamespace(act=lambda alarm: (alarms.append(alarm), returned)[1])
    monkeypatch.setitem(sys.modules, "own_action", module)
    run = Runs(tmp_path, on_alarm="own_action:act")
    run.feed(1, [0] * 6 + [24])
    assert [(alarm.state, alarm.step, alarm.now.count) for alarm in alarms] == [("empty", 7, 24)]
    assert (run.log.stop_reason is not None) == stops


def test_what_fails_takes_nothing_else_with_it(tmp_path, monkeypatch, caplog):
    class Broken(Alerts):
        def alert(self, **values):
            raise OSError("no network")

    run = Runs(tmp_path, Broken(), on_alarm="stop")
    (tmp_path / HEALTH_FILE).mkdir()
    failures = []
    for step, count in enumerate([0] * 6 + [24]):
        with pytest.raises(ExceptionGroup) as failure:
            run.feed(step, [count])
        failures.append(failure.value)
    assert "no network" in str(failures[-1].exceptions[1]) and run.log.stop_reason is not None
    assert sum("empty in 24" in line for line in lines(caplog)) == 1


def test_null_is_no_alarm_and_no_file(tmp_path, caplog):
    run = Runs(tmp_path, on_alarm=None)
    run.feed(1, [0] * 6 + [24])
    assert not lines(caplog) and not list(tmp_path.iterdir()) and run.log.stop_reason is None


def test_the_answers_to_a_prompt_are_one_entry_in_the_order_of_their_generations():
    answers = [answer(3, "", 1), answer(5, "x"), answer(3, "fine", 0), answer(3, " ", 2)]
    states = prompt_states(answers, measure_round(answers, Vocabulary()))
    assert [(x.prompt, [list(own) for own in x.answers]) for x in states] == [
        ("3", [[], ["empty"], ["empty"]]),
        ("5", [[]]),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"on_alarm": "mail"}, "alarms.on_alarm is 'mail'; it must be log, stop, module:function or null"),
        ({"false_alarms": 0.0}, "alarms.false_alarms is 0.0; it must be more than 0 and less than 1"),
        ({"false_alarms": 1}, "less than 1"),
        ({"warm_up": -1}, "alarms.warm_up is -1; it must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        AlarmsConfig(**values)


def test_the_warm_up_is_that_of_the_model_unless_it_is_given():
    for given, trained, warm_up in ((None, True, 0), (None, False, 8), (3, True, 3), (3, False, 3)):
        assert AlarmsConfig(warm_up=given).of_trained(trained=trained).warm_up == warm_up
    run = Runs(None, warm_up=None)
    run.feed(1, [0] * 7 + [24])
    assert not run.log._alarms.lasting
    run = Runs(None, warm_up=None)
    run.feed(1, [0] * 8 + [24])
    assert run.log._alarms.lasting


def test_a_function_that_is_not_there_is_named_at_the_start():
    with pytest.raises(ConfigError, match="alarms.on_alarm 'json:no_such'"):
        Runs(None, on_alarm="json:no_such")


def test_the_file_is_small(tmp_path):
    Runs(tmp_path).feed(1, [1] * 4, size=128)
    assert (tmp_path / HEALTH_FILE).stat().st_size / 4 < 3000
    json.loads((tmp_path / HEALTH_FILE).read_text().splitlines()[0])
