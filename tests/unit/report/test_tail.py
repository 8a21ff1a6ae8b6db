import io

import pytest
from rich.console import Console

from lockstep.errors import ConfigError, LockstepError
from lockstep.report import append_jsonl, drop_later
from lockstep.report.saved_rows import parse_row
from lockstep.report.tail import FollowedFile, LineView, PanelView, Tail, number_text, row_line, trend


def row(step, text="x", prompt=0):
    return {"step": step, "prompt_id": prompt, "prompt": "p", "generated_text": text, "reward": step / 10}


@pytest.fixture
def run(tmp_path):
    append_jsonl(tmp_path / "samples.jsonl", [row(0), row(0, prompt=1), row(10, "a"), row(10, "b", 1)])
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": n, "time": 1.0, "loss": 5.0 - n, "kind": "w"} for n in range(3)])
    return tmp_path


def test_the_newest_of_everything(run):
    tail = Tail(str(run))
    assert tail.look() and not tail.look()
    assert [(each.when, each.generated_text) for each in tail.newest] == [(10, "a"), (10, "b")]
    assert tail.metrics == {"loss": (2, 3.0), "kind": (2, "w")}
    assert list(tail.trends["loss"]) == [5.0, 4.0, 3.0] and "kind" not in tail.trends
    append_jsonl(run / "samples.jsonl", [row(20, "c")])
    assert tail.look()
    assert [each.generated_text for each in tail.newest] == [each.generated_text for each in tail.new_rows] == ["c"]
    assert not tail.new_metrics


def test_a_run_that_goes_back_shows_what_is_left(run):
    tail = Tail(str(run))
    tail.look()
    drop_later(run / "samples.jsonl", 0)
    drop_later(run / "metrics.jsonl", 1)
    append_jsonl(run / "metrics.jsonl", [{"step": 2, "loss": 9.0}])
    assert tail.look()
    assert tail.went_back and [row.when for row in tail.newest] == [0, 0]
    assert tail.metrics["loss"] == (2, 9.0) and list(tail.trends["loss"]) == [5.0, 4.0, 9.0]
    drop_later(run / "metrics.jsonl", 2)
    assert not tail.look(), "the file is another one, and what was read is in it"


def test_a_run_that_has_not_begun_is_waited_for_unless_nobody_follows(tmp_path):
    tail = Tail(str(tmp_path))
    assert not tail.look()
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    assert tail.look() and tail.metrics
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no samples\.jsonl, rollouts\.jsonl or metrics\.jsonl\. Name"):
        Tail(str(tmp_path / "empty"), must_be_there=True)


def steps(news):
    return [record["step"] for _, record in news[1]]


def test_only_what_is_new_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    file = FollowedFile(path)
    assert file.look() == (False, [])
    append_jsonl(path, [{"step": 0}, {"step": 1}])
    assert steps(file.look()) == [0, 1]
    assert file.look() == (False, [])
    append_jsonl(path, [{"step": 2}])
    assert file.look() == (False, [(f"{path}:3", {"step": 2})])


def test_half_a_line_waits_for_the_other_half(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"st')
    file = FollowedFile(path)
    assert steps(file.look()) == [0]
    with open(path, "a", encoding="utf-8") as writer:
        writer.write('ep": 1}')
    assert steps(file.look()) == []
    assert steps(file.look(at_end=True)) == [1]
    with open(path, "a", encoding="utf-8") as writer:
        writer.write('\n{"step": 2}\n')
    assert steps(file.look()) == [2]


@pytest.mark.parametrize("more", [0, 3])
def test_a_file_that_has_lost_lines_is_read_anew(tmp_path, more):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 10}\n{"step": 11}\n')
    file = FollowedFile(path)
    file.look()
    path.write_text('{"step": 10}\n' + '{"step": 22}\n' * more)
    news = file.look()
    assert (news[0], steps(news)) == (True, [10] + [22] * more)
    append_jsonl(path, [{"step": 4}])
    assert file.look() == (False, [(f"{path}:{more + 2}", {"step": 4})])


def test_a_line_that_is_not_a_record_is_said_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n\n[1]\n')
    with pytest.raises(LockstepError, match=r"rows\.jsonl:3 is a JSON list, not an object"):
        FollowedFile(path).look()


ROW = {"step": 10, "prompt_id": 3, "prompt": "What?", "generated_text": "That.", "finish_reason": "stop", "reward": 0.5}


def console(width=100, height=30):
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=False, highlight=False)


def test_a_row_is_one_line_whatever_is_in_it():
    hostile = "a\nb\x1b[31m\u202e\ud800 [bold]x[/bold]"
    line = row_line(parse_row({**ROW, "prompt": hostile, "verdict": hostile, "bad\nname": 1}, "f:1"))
    assert line.isprintable() or "\\ud800" in line
    assert r"a↵b\x1b[31m\u202e\ud800 [bold]x[/bold]" in line and r"bad↵name 1" in line
    assert row_line(parse_row(ROW, "f:1")) == "step 10  #3.0  What? → That.  [stop  reward 0.5]"
    long = row_line(parse_row({**ROW, "generated_text": "x" * 1000}, "f:1"))
    assert "(840 more characters)" in long and len(long) < 300


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (3.0, "3"), (12000.0, "12,000"), (0.123456, "0.1235"), (float("nan"), "nan"), ("w\x1b", r"w\x1b")],
)
def test_numbers_for_reading(value, text):
    assert number_text(value) == text


def test_a_trend_has_its_lowest_and_its_highest_at_the_ends():
    assert trend([0.0, 1.0, float("nan"), 0.5]) in ("▁█ ▄", "▁█ ▅")
    assert trend([2.0, 2.0]) == "▁▁" and trend([1.0]) == ""


@pytest.fixture
def tail(tmp_path):
    rows = [{**ROW, "prompt_id": n, "generated_text": f"answer {n} [red]"} for n in range(5)]
    append_jsonl(tmp_path / "samples.jsonl", rows)
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 3, "samples/reward": 0.5}])
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": n, "train/loss": 1 / (n + 1)} for n in range(8)])
    tail = Tail(str(tmp_path))
    tail.look()
    return tail


def test_the_panel_has_metrics_and_samples_and_counts_what_is_left_out(tail):
    shown = console()
    shown.print(PanelView(tail, 3).render(shown))
    text = shown.file.getvalue()
    assert "step 7" in text and "train/loss" in text and "0.125" in text and "█" in text
    assert "what the model says at step 10" in text and "answer 2 [red]" in text and "answer 3" not in text
    assert "3 of 5 rows" in text


def test_metrics_that_do_not_fit_are_counted(tmp_path):
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, **{f"metric {n}": n for n in range(50)}}])
    tail = Tail(str(tmp_path))
    tail.look()
    shown = console(height=20)
    shown.print(PanelView(tail, 3).render(shown))
    text = shown.file.getvalue()
    assert "36 more metrics" in text and "metric 13" in text and "metric 14" not in text and "no samples yet" in text


ALARM = {"step": 10, "name": "rollout", "alarm": {"step": 10, "state": "loop", "began": 5}, "line": "loop \x1b[31m"}


def round_after(step, *lasting):
    return {"step": step, "name": "rollout", "round": {"lasting": [{"state": state} for state in lasting]}}


def test_an_alarm_is_a_line_and_stands_above_the_panel_while_it_lasts(tail, tmp_path):
    lines, shown = console(), console()
    view = LineView(tail, 2, lines)
    view.show()
    append_jsonl(tmp_path / "health.jsonl", [round_after(10, "loop"), ALARM])
    assert tail.look()
    view.show()
    assert lines.file.getvalue().splitlines()[5:] == ["▲ rollout: loop \\x1b[31m"]
    shown.print(PanelView(tail, 3).render(shown))
    assert shown.file.getvalue().splitlines()[0].startswith("▲ rollout: loop \\x1b[31m")
    append_jsonl(tmp_path / "health.jsonl", [round_after(15, "loop")])
    assert tail.look() and tail.alarms and not tail.new_alarms
    late = console()
    LineView(tail, 2, late).show()
    assert late.file.getvalue().splitlines()[-1] == "▲ rollout: loop \\x1b[31m"
    append_jsonl(tmp_path / "health.jsonl", [round_after(20)])
    assert tail.look() and not tail.alarms
    drop_later(tmp_path / "health.jsonl", 15)
    assert tail.look() and list(tail.alarms) == [("rollout", "loop")], "the run went back"


def test_lines_begin_with_the_newest_and_go_on_with_all(tail, tmp_path):
    shown = console()
    view = LineView(tail, 2, shown)
    view.show()
    first = shown.file.getvalue().splitlines()
    assert first[:2] == ["step 3  samples/reward 0.5", "step 7  train/loss 0.125"]
    assert [line.split("  ")[1] for line in first[2:4]] == ["#0.0", "#1.0"]
    assert first[4:] == ["step 10  … 3 more of 5 samples"]
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 8, "train/loss": 0.1}, {"step": 9, "train/loss": 0.05}])
    tail.look()
    view.show()
    assert shown.file.getvalue().splitlines()[5:] == ["step 8  train/loss 0.1", "step 9  train/loss 0.05"]
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    (tmp_path / "metrics.jsonl").write_text("".join(kept))
    tail.look()
    view.show()
    left = ["step 1  train/loss 0.5", "step 3  samples/reward 0.5"]
    assert shown.file.getvalue().splitlines()[7:10] == ["the run went back to a checkpoint; what is left:", *left]
