from lockstep.report import JsonlTrackerConfig, build_tracker, read_jsonl
from tests.unit.report.trackers.fakes import row


def test_jsonl_lines_hold_step_time_and_metrics(tmp_path):
    tracker = build_tracker(JsonlTrackerConfig(), tmp_path / "run", "name")
    tracker.log({"train/loss": 1.5}, step=1)
    tracker.log({"train/loss": float("nan")}, step=2)
    tracker.log_rows("inference_eval/samples", [row(2, "text")], step=2)
    tracker.finish()
    first, second = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (first["step"], first["train/loss"], second["train/loss"]) == (1, 1.5, "NaN")
    assert first["time"] <= second["time"]
