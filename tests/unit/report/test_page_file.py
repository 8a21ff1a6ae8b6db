"""The page of a run that is watched."""

import pytest

from lockstep.errors import LockstepError
from lockstep.report import append_jsonl, watch
from tests.unit.main.test_results import rows
from tests.unit.main.test_results import run as run


def test_a_watched_run_is_written_anew_when_it_has_changed(run, capsys):
    page, seen = run / "report.html", []

    def sleep(seconds):
        assert seconds == 7
        seen.append(page.stat().st_mtime_ns if page.exists() else None)
        if len(seen) == 2:
            append_jsonl(run / "samples.jsonl", rows(20))
        if len(seen) == 3:
            raise KeyboardInterrupt

    assert watch([str(run)], page, 7, sleep) == 0
    assert seen[0] == seen[1] != seen[2]
    assert "at 20" in page.read_text() and '"reload_s":null' in page.read_text()
    assert capsys.readouterr().out.count("report.html: ") == 3


def test_a_run_without_rows_is_waited_for(tmp_path, capsys):
    page, looks = tmp_path / "report.html", []

    def sleep(_):
        looks.append(page.exists() and '"reload_s":7' in page.read_text())
        if len(looks) == 1:
            (tmp_path / "samples.jsonl").write_text('{"step": 0, "prom')
        if len(looks) == 2:
            append_jsonl(tmp_path / "samples.jsonl", rows(0))
        if len(looks) == 3:
            raise KeyboardInterrupt

    assert watch([str(tmp_path)], page, 7, sleep) == 0
    assert looks == [False, False, True]
    assert capsys.readouterr().out.count("no rows yet; waiting") == 1


def test_a_line_that_cannot_be_read_ends_the_watch(run):
    (run / "samples.jsonl").write_text("{}\n")
    with pytest.raises(LockstepError, match=r"samples\.jsonl:1: the column 'step' is missing"):
        watch([str(run)], run / "report.html", 1, pytest.fail)
