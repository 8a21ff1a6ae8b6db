"""``lockstep convert``: the rows of a run as Parquet and as logs of inspect_ai."""

import pytest

from lockstep.errors import ConfigError
from lockstep.main.convert import ConvertConfig, convert, main
from lockstep.report import append_jsonl, read_jsonl
from tests.unit.report.test_inspect_log import ROWS, TASK


@pytest.fixture
def run(tmp_path):
    append_jsonl(tmp_path / "run" / "samples.jsonl", ROWS)
    append_jsonl(tmp_path / "run" / "tasks.jsonl", [TASK])
    return tmp_path / "run"


def test_a_run_as_parquet(run, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main([str(run), "--format", "parquet"]) == 0
    assert capsys.readouterr().out.split() == [str(run / "samples.parquet"), str(run / "tasks.parquet")]
    found = parquet.read_table(run / "samples.parquet").to_pylist()
    assert found == [{"judge": None, **row} for row in read_jsonl(run / "samples.jsonl")]


def test_a_run_as_logs_of_inspect(run, tmp_path):
    assert len(convert(ConvertConfig(run=str(run), format="inspect"))) == 3
    assert len(list((run / "inspect").glob("*.json"))) == 3
    written = convert(ConvertConfig(run=str(run / "tasks.jsonl"), format="inspect", output=str(tmp_path / "out")))
    assert [path.parent for path in written] == [tmp_path / "out"]


def test_what_has_no_rows_is_refused(tmp_path):
    (tmp_path / "samples.jsonl").touch()
    with pytest.raises(ConfigError, match="which is no file of rows and has none of samples.jsonl, tasks.jsonl"):
        convert(ConvertConfig(run=str(tmp_path), format="parquet"))
    with pytest.raises(ConfigError, match="format is 'csv'; it must be parquet or inspect"):
        ConvertConfig(run=str(tmp_path), format="csv")
