"""The report: lines in a log, a table at a terminal, JSON after every section."""

import io
import json

import pytest
from rich.console import Console

from lockstep.errors import ConfigError
from lockstep.main.doctor.finding import Finding, merge
from lockstep.main.doctor.report import Report

FULL = Finding.to_fix("disk", "1 MiB [of] 2 free", "Delete something.")
GOOD = Finding.ok("devices", "4 of cpu")


def test_a_log_has_a_line_for_each_finding(tmp_path):
    out = io.StringIO()
    report = Report(Console(file=out, width=40), tmp_path / "new" / "report.json")
    report.begin()
    report.add("machine", merge([[FULL], []]), {"speed": 3})
    kept = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (kept["complete"], kept["exit_code"], kept["speed"]) == (False, 1, 3)
    report.add("job", merge([[GOOD]]))
    report.add("reach", [])
    assert report.finish() == 1
    first, second, last = out.getvalue().splitlines()
    assert first == "fix      disk (process 0): 1 MiB [of] 2 free Fix: Delete something."
    assert second == "ok       devices: 4 of cpu"
    assert last.startswith("1 ok, 0 warnings, 1 to fix, ") and last.endswith("report.json")
    kept = json.loads((tmp_path / "new" / "report.json").read_text())
    assert kept["complete"] and kept["sections"]["machine"][0]["fix"] == "Delete something."
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_a_terminal_gets_a_table():
    out = io.StringIO()
    report = Report(Console(file=out, width=60, force_terminal=True, color_system=None))
    report.add("machine", merge([[FULL], []]))
    text = out.getvalue()
    assert "machine" in text and "[of]" in text and "process 0" in text and "Delete something." in text


def test_without_a_fix_the_exit_code_is_0_and_nothing_is_shown_without_a_console():
    report = Report()
    report.add("job", merge([[GOOD, Finding.warning("mesh", "large")]]))
    assert report.finish() == 0


def test_a_file_that_cannot_be_written_is_found_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"json is .*file/report\.json, which cannot be written: .* Choose another"):
        Report(None, tmp_path / "file" / "report.json").begin()
