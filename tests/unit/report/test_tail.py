import pytest

from lockstep.errors import ConfigError
from lockstep.report import append_jsonl, drop_later
from lockstep.report.tail import Tail


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
    assert tail.taken_back == 3
    assert [each.when for each in tail.newest] == [0, 0]
    assert tail.metrics["loss"] == (2, 9.0) and list(tail.trends["loss"]) == [5.0, 4.0, 9.0]
    assert [record.values for record in tail.new_metrics] == [{"loss": 9.0}] and not tail.new_rows


def test_a_run_that_has_not_begun_is_waited_for_unless_nobody_follows(tmp_path):
    tail = Tail(str(tmp_path))
    assert not tail.look()
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    assert tail.look() and tail.metrics
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no samples\.jsonl, rollouts\.jsonl or metrics\.jsonl\. Name"):
        Tail(str(tmp_path / "empty"), must_be_there=True)
