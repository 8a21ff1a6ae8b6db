"""Merged rows as Parquet."""

import sys

import pytest

from lockstep.batch_inference.parquet import check_pyarrow, write_parquet
from lockstep.errors import ConfigError
from lockstep.report import read_jsonl


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
    with pytest.raises(ConfigError, match=r"pip install 'jax-lockstep\[parquet\]', or set write_parquet to false"):
        check_pyarrow()
