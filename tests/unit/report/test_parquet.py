"""Merged rows as Parquet."""

import sys

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.report import append_jsonl, check_pyarrow, read_jsonl, write_parquet


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
