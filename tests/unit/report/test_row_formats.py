"""Merged rows as Parquet."""

import json
import math
import sys
from datetime import UTC, datetime

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.report import append_jsonl, check_pyarrow, read_jsonl, write_inspect_log, write_parquet
from tests.unit.report import made_up


def test_parquet_holds_the_merged_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    merged = tmp_path / "samples.jsonl"
    merged.write_text("".join(f'{{"round": 0, "prompt_id": {i}, "generated_text": "ü {i}"}}\n' for i in range(10_000)))
    assert parquet.read_table(write_parquet(merged)).to_pylist() == read_jsonl(merged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.jsonl", "samples.parquet"]


def test_a_metric_without_a_value_at_first_is_a_number(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    merged = tmp_path / "samples.jsonl"
    lines = [f'{{"prompt_id": {i}, "gsm8k": {"null" if i < 5000 else "1.0"}}}\n' for i in range(6000)]
    merged.write_text("".join(lines))
    table = parquet.read_table(write_parquet(merged))
    assert table.to_pylist() == read_jsonl(merged) and str(table.schema.field("gsm8k").type) == "double"


def test_without_pyarrow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"pip install 'jax-lockstep\[parquet\]', or do without .*write_parquet: false"
    ):
        check_pyarrow()


def test_rows_of_a_run_may_gain_columns_and_numbers_that_are_not_finite(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = tmp_path / "samples.jsonl"
    append_jsonl(lines, [{"step": 1, "said": "NaN", "score": 2, "none": None}])
    with lines.open("ab") as file:
        file.write(b'{"step": 2, "said": "\\ud800 x", "score": "Infinity", "judge": 0.5}\n{"step": 3, "to')
    found = parquet.read_table(write_parquet(lines, tmp_path / "out.parquet"))
    assert found.to_pylist() == [
        {"step": 1, "said": "NaN", "score": 2.0, "none": None, "judge": None},
        {"step": 2, "said": "? x", "score": float("inf"), "none": None, "judge": 0.5},
    ]
    assert [str(each.type) for each in found.schema] == ["int64", "string", "double", "double", "double"]


@pytest.mark.parametrize(("last", "steps"), [('{"step": 2}', [1, 2]), ('{"step": 2', [1])])
def test_a_last_line_without_a_newline_is_a_row_where_it_is_whole_as_for_other_readers(tmp_path, last, steps):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = tmp_path / "samples.jsonl"
    lines.write_text('{"step": 1}\n\n' + last)
    assert [row["step"] for row in read_jsonl(lines)] == steps
    assert [row["step"] for row in parquet.read_table(write_parquet(lines)).to_pylist()] == steps


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "has no row"),
        ([{"a": "x"}, {"a": 1}], "the column 'a' has values of several kinds: int, text"),
        ([{"a": ["x", 1.5]}], "the column 'a' has values of several kinds: list of several kinds"),
        ([{"a": ["x"]}, {"a": [1.5]}], "the column 'a' has values of several kinds: list of float, list of text"),
        ([{"a": [[1]]}], "the column 'a' has values of several kinds: list of list"),
        ([{"a": [True]}], "the column 'a' has values of several kinds: list of bool"),
        ([{"a": 10**400}, {"a": 0.5}], "as Parquet cannot be read .*Correct the rows"),
    ],
)
def test_what_has_no_columns_is_refused(tmp_path, records, message):
    pytest.importorskip("pyarrow")
    lines = tmp_path / "samples.jsonl"
    append_jsonl(lines, records)
    with pytest.raises(LockstepError, match=message):
        write_parquet(lines)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_fields_of_prompts_are_columns(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    fields = [
        {"id": 7, "level": "easy", "tags": ["a"], "meta": {"b": 1}, "mixed": 1, "step": "other"},
        {"id": 8, "score": 0.5, "mixed": "two"},
    ]
    append_jsonl(tmp_path / "rows.jsonl", [{"step": 1, "prompt": "p", "fields": each} for each in fields])
    table = parquet.read_table(write_parquet(tmp_path / "rows.jsonl")).to_pydict()
    assert table == {
        "step": [1, 1],
        "prompt": ["p", "p"],
        "fields.id": [7, 8],
        "fields.level": ["easy", None],
        "fields.tags": [["a"], None],
        "fields.meta": ['{"b": 1}', None],
        "fields.mixed": ["1", '"two"'],
        "fields.step": ["other", None],
        "fields.score": [None, 0.5],
    }


def test_lists_of_tokens_are_columns_too(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"token_ids": [3, 4], "logprobs": [-0.5, "-Infinity"], "tokens": ["a", "NaN"], "none": []},
        {"token_ids": [], "logprobs": [-1], "tokens": ["NaN"], "none": []},
    ]
    append_jsonl(tmp_path / "a.jsonl", rows)
    got = parquet.read_table(write_parquet(tmp_path / "a.jsonl")).to_pylist()
    assert got == [
        {"token_ids": [3, 4], "logprobs": [-0.5, float("-inf")], "tokens": ["a", "NaN"], "none": None},
        {"token_ids": [], "logprobs": [-1.0], "tokens": ["NaN"], "none": None},
    ]


MADE = datetime(2026, 11, 23, 8, 30, tzinfo=UTC)
HOSTILE = "</script>\x1b[31m\u202e <b>|"


def row(step, generation, **metrics):
    values = {"step": step, "prompt_id": 4, "generation_id": generation, "metrics": metrics}
    return made_up.row(HOSTILE, num_tokens=7, finish_reason="length", **values).to_dict()


ROWS = [row(10, 0, good=1.0, judge=None), row(10, 1, good=0.0, judge=7.5), row(20, 0, good=1.0)]
TASK = {
    "step": 20,
    "task": "own/words",
    "question_id": 2,
    "prompt": "What?",
    "generated_text": "x",
    "answer": "y",
    "acc": 0.0,
}
SAMPLE = {"round": 1, "prompt_id": 0, "generation_id": 0, "prompt": "p", "generated_text": "g", "num_tokens": 1}
SAMPLE |= {"finish_reason": "stop"}


def test_each_step_and_task_is_a_log(tmp_path):
    paths = write_inspect_log([*ROWS, TASK, SAMPLE], tmp_path, run="my run", created=MADE)
    assert [path.name for path in paths] == [
        "2026-11-23T08-30-00+00-00_samples_step-000010.json",
        "2026-11-23T08-30-00+00-00_samples_step-000020.json",
        "2026-11-23T08-30-00+00-00_own-words_step-000020.json",
        "2026-11-23T08-30-00+00-00_samples_round-000001.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    first = json.loads(paths[0].read_text())
    assert first["eval"]["model"] == "lockstep/my run@step-10" and first["results"]["total_samples"] == 2
    assert {each["name"]: each["metrics"]["mean"]["value"] for each in first["results"]["scores"]} == {
        "good": 0.5,
        "judge": 7.5,
    }


THEIRS = {
    "step": 30,
    "prompt_id": "q-7",
    "prompt": "What?",
    "generated_text": "x",
    "num_tokens": None,
    "verdict": "good \ud83d",
    "score": "NaN",
    "passed": True,
}


def test_rows_of_other_programs_may_have_names_and_texts(tmp_path):
    (path,) = write_inspect_log([THEIRS], tmp_path, run="run", created=MADE)
    (sample,) = json.loads(path.read_text())["samples"]
    assert (sample["id"], sample["metadata"]) == ("q-7", {"verdict": "good ?"})
    values = {name: score["value"] for name, score in sample["scores"].items()}
    assert values["passed"] == 1.0 and math.isnan(values["score"]) and len(values) == 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"step": 1, "prompt_id": 0, "prompt": "a"}, "KeyError: 'generated_text'"),
        ({**THEIRS, "score": [1]}, "TypeError: .*list"),
        ({**THEIRS, "step": "soon"}, "ValueError: .*soon"),
    ],
)
def test_a_row_that_is_no_sample_is_named_before_anything_is_written(tmp_path, row, why):
    with pytest.raises(LockstepError, match=rf"^row 2 of run as a sample of inspect_ai .*{why}.*\. A row has step"):
        write_inspect_log([THEIRS, row], tmp_path / "logs", run="run", created=MADE)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_inspect_itself_reads_the_logs(tmp_path):
    inspect_log = pytest.importorskip("inspect_ai.log")
    write_inspect_log([*ROWS, TASK, SAMPLE, THEIRS], tmp_path, run="run", created=MADE)
    logs = [inspect_log.read_eval_log(info.name) for info in inspect_log.list_eval_logs(str(tmp_path))]
    steps = ("step-10", "step-20", "round-1", "step-30")
    assert {log.eval.model for log in logs} == {f"lockstep/run@{step}" for step in steps}
    (theirs,) = [log.samples[0] for log in logs if log.eval.model == "lockstep/run@step-30"]
    assert (theirs.id, theirs.metadata["verdict"]) == ("q-7", "good ?")
    (log,) = [log for log in logs if log.eval.model == "lockstep/run@step-10"]
    assert log.status == "success" and log.version == 2
    assert [(one.id, one.epoch, one.input, one.output.completion) for one in log.samples] == [
        (4, 1, "What?", HOSTILE),
        (4, 2, "What?", HOSTILE),
    ]
    assert [one.output.choices[0].stop_reason for one in log.samples] == ["max_tokens"] * 2
    assert {name: score.value for name, score in log.samples[1].scores.items()} == {"good": 0.0, "judge": 7.5}
    assert {each.name: each.metrics["mean"].value for each in log.results.scores} == {"good": 0.5, "judge": 7.5}
    (task,) = [log for log in logs if log.eval.task == "own/words"]
    assert (task.samples[0].id, task.samples[0].target, task.samples[0].scores["acc"].value) == (2, "y", 0.0)


def test_nothing_is_not_a_log(tmp_path):
    with pytest.raises(LockstepError, match="there are no rows to write"):
        write_inspect_log([], tmp_path, run="run", created=MADE)
