import io

import pytest
from rich.console import Console

from lockstep.report import append_jsonl
from lockstep.report.saved_rows import parse_row
from lockstep.report.tail import Tail
from lockstep.report.tail_views import LineView, PanelView, number_text, row_line, trend

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
    assert shown.file.getvalue().splitlines()[7:] == ["the run went back: 8 lines were taken back"]
