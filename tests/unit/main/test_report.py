import subprocess
import sys

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.main.report import main, watch
from lockstep.report import append_jsonl


def rows(*steps):
    return [{"step": step, "prompt_id": 0, "prompt": "p", "generated_text": f"at {step}"} for step in steps]


@pytest.fixture
def run(tmp_path):
    append_jsonl(tmp_path / "run" / "samples.jsonl", rows(0, 10))
    return tmp_path / "run"


def test_the_page_is_beside_the_rows(run, capsys):
    assert main([str(run)]) == 0
    assert "at 10" in (run / "report.html").read_text()
    assert f"{run}/report.html: 1 prompt, 2 steps, 2 answers, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["run/samples.jsonl"], "run/report.html"),
        (["run/mine.jsonl"], "run/mine.html"),
        (["run", "other"], "run/report-run-and-other.html"),
        (["run", "-o", "here.html"], "here.html"),
        (["--output=here.html", "run", "other"], "here.html"),
    ],
)
def test_where_the_page_goes(run, monkeypatch, arguments, place):
    monkeypatch.chdir(run.parent)
    append_jsonl("run/mine.jsonl", rows(1))
    append_jsonl("other/samples.jsonl", rows(0))
    assert main(arguments) == 0
    assert {str(path.relative_to(run.parent)) for path in run.parent.rglob("*.html")} == {place}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one run, or two to compare; 0 were given. See lockstep report --help"),
        (["a", "b", "c"], "3 were given"),
        (["no/such/run"], "no/such/run does not exist"),
        (["run", "--interval", "0"], "'0' is not a number of seconds from 0.1 to 86400"),
        (["run", "--wach"], "unrecognized arguments: --wach"),
    ],
)
def test_wrong_arguments(run, monkeypatch, arguments, message):
    monkeypatch.chdir(run.parent)
    with pytest.raises(ConfigError, match=message):
        main(arguments)


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


def test_a_page_that_cannot_be_written_says_what_to_do(run):
    (run / "folder").mkdir()
    with pytest.raises(LockstepError, match=r"Is a directory.*Name a file that can be written with --output FILE"):
        main([str(run), "-o", str(run / "folder")])


def test_a_line_that_cannot_be_read_ends_the_watch(run):
    (run / "samples.jsonl").write_text("{}\n")
    with pytest.raises(LockstepError, match=r"samples\.jsonl:1: the column 'step' is missing"):
        watch([str(run)], run / "report.html", 1, pytest.fail)


COMMAND = """
import sys
from lockstep.main.cli import main
sys.argv[0] = "lockstep"
try:
    main()
finally:
    print("jax" in sys.modules)
"""


def test_the_command_does_not_wait_for_jax_and_its_errors_are_a_line(run):
    def command(*arguments):
        return subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, check=False)

    done = command("report", str(run))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr
    done = command("report", "nowhere")
    assert done.returncode == 1 and done.stderr.startswith("error: nowhere does not exist")
    assert done.stderr.count("\n") == 1
