import json
import math

import pytest

from lockstep.errors import LockstepError
from lockstep.report import append_jsonl
from lockstep.report.html.series import MAX_POINTS, read_series


def test_curves_are_read_and_the_last_value_of_a_step_counts(tmp_path):
    records = [
        {"step": 1, "time": 3.0, "loss": 2.0, "name": "x"},
        {"step": 0, "loss": "NaN"},
        {"step": 1, "loss": 1.0, "ok": True},
    ]
    append_jsonl(tmp_path / "metrics.jsonl", records)
    series = read_series([tmp_path / "metrics.jsonl"])
    assert list(series) == ["loss", "ok"]
    assert (
        list(series["loss"].steps) == [0, 1]
        and math.isnan(series["loss"].values[0])
        and series["loss"].values[1] == 1.0
    )
    assert list(series["ok"].values) == [1.0]


def test_a_long_curve_keeps_its_ends_and_its_extremes(tmp_path):
    values = [math.sin(n / 50) for n in range(20_000)]
    values[7_777], values[12_345], values[5_000] = 50.0, -50.0, math.nan
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": n, "loss": value} for n, value in enumerate(values)])
    curve = read_series([tmp_path / "metrics.jsonl"])["loss"]
    assert curve.points == 20_000 and len(curve.steps) <= MAX_POINTS + 1
    assert list(curve.steps) == sorted(set(curve.steps)) and (curve.steps[0], curve.steps[-1]) == (0, 19_999)
    assert {7_777, 12_345, 5_000} <= set(curve.steps)
    assert all(
        a == b or math.isnan(a) for a, b in zip(curve.values, (values[step] for step in curve.steps), strict=True)
    )


@pytest.mark.parametrize("step", [None, "7", True, 1.5])
def test_a_line_without_a_step_is_said_with_its_number(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n' + json.dumps({"step": step, "loss": 2}) + "\n")
    with pytest.raises(LockstepError, match=r"metrics\.jsonl:2: the column 'step' is .*; a whole number was expected"):
        read_series([path])


def test_half_of_a_last_line_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "lo')
    assert list(read_series([tmp_path / "metrics.jsonl"])["loss"].steps) == [1]
