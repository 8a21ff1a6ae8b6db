"""Rows of a run in other formats."""

import pytest

from lockstep.errors import ConfigError
from lockstep.report import ConvertConfig, append_jsonl, convert
from tests.unit.main.test_results import with_tasks as with_tasks
from tests.unit.report.test_row_formats import ROWS


def test_rows_of_training_and_of_lockstep_sample_are_two_tables(with_tasks, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    append_jsonl(with_tasks / "samples" / "samples.jsonl", [{"round": 0, "prompt_id": 0, "generated_text": "x"}])
    written = convert(ConvertConfig(run=str(with_tasks), format="parquet", output=str(tmp_path / "out")))
    names = ["samples.parquet", "tasks.parquet", "samples/samples.parquet"]
    assert written == [tmp_path / "out" / name for name in names]
    assert [parquet.read_table(path).num_rows for path in written] == [len(ROWS), 1, 1]


def test_a_run_as_logs_of_inspect(with_tasks, tmp_path):
    assert len(convert(ConvertConfig(run=str(with_tasks), format="inspect"))) == 3
    assert len(list((with_tasks / "inspect").glob("*.json"))) == 3
    written = convert(
        ConvertConfig(run=str(with_tasks / "tasks.jsonl"), format="inspect", output=str(tmp_path / "out"))
    )
    assert [path.parent for path in written] == [tmp_path / "out"]


def test_what_has_no_rows_is_refused(tmp_path):
    (tmp_path / "samples.jsonl").touch()
    with pytest.raises(ConfigError, match="which is no file of rows and has none of samples.jsonl, tasks.jsonl"):
        convert(ConvertConfig(run=str(tmp_path), format="parquet"))
    with pytest.raises(ConfigError, match="format is 'csv'; it must be one of parquet, inspect"):
        ConvertConfig(run=str(tmp_path), format="csv")
