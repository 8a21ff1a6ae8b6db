import io

import pytest
from rich.console import Console

from lockstep.check.compare import End
from lockstep.check.findings import Finding, Frame, Place
from lockstep.check.run import CheckResult, print_at_once, print_report, render_page, write_page

EVIL = "<script>alert(1)</script> [bold]"


def result(*findings, code=0, end=End.DONE):
    fields = {"launches": (12, 12), "other_threads": 0, "errors": {}, "seconds": 1.5}
    return CheckResult(command=("python", "train.py"), code=code, end=end, findings=findings, **fields)


@pytest.fixture
def finding():
    own = Frame(file="train.py", line=7, function="main", text=f"log({EVIL!r})", own=True)
    library = Frame(file="/site-packages/tracker.py", line=3, function="log", text="", own=False)
    places = (
        Place(process=0, text="launches zeros", stack=(library, own)),
        Place(process=1, text="launches nothing more"),
    )
    return Finding(kind="one_process", text=EVIL, places=places, count=3, details=("a set",))


def printed(result):
    file = io.StringIO()
    print_report(result, Console(file=file, width=60, highlight=False))
    return file.getvalue()


def test_nothing_found_is_one_line_and_exit_code_0():
    assert printed(result()).strip() == "✓ nothing found (launches by process: 12, 12; 1.5 s)"
    assert result().exit_code == 0


def test_a_finding_has_the_users_own_line_the_stack_and_the_way_out(finding):
    text = printed(result(finding))
    assert "process 0 launches zeros at train.py:7" in text and "tracker.py:3 in log" in text
    assert "process 1 launches nothing more\n" in text
    assert "3 times" in text and "| a set" in text and EVIL in text
    assert f"On a pod: {finding.about.on_pod}" in text and f"Change: {finding.about.fix}" in text
    assert result(finding).exit_code == 1
    assert "docs/" not in text  # an installed user has no clone


def test_what_is_seen_during_the_run_is_one_line_with_both_places(finding):
    file = io.StringIO()
    print_at_once(finding, Console(file=file, width=60, highlight=False))
    (line,) = file.getvalue().splitlines()
    assert line.startswith(f"lockstep check: one_process: {EVIL}: process 0 launches zeros at train.py:7")
    assert line.endswith("; process 1 launches nothing more")


def test_a_run_that_failed_is_not_clean():
    failed = result(code=1, end=End.FAILED)
    assert failed.exit_code == 1 and "exit code 1" in failed.problem and "compared up to there" in printed(failed)
    assert "! nothing found up to there" in printed(failed) and "✓" not in printed(failed) + render_page(failed)


def test_the_page_runs_no_script_and_escapes_what_is_in_it(finding, tmp_path):
    write_page(result(finding), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page == render_page(result(finding))
    assert "default-src 'none'; style-src 'sha256-" in page
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "train.py:7" in page and "tracker.py:3 in log" in page
