"""The commands that look at the results of a run."""

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from lockstep.errors import ConfigError, LockstepError
from lockstep.main.results import run_convert, run_report, run_tail
from lockstep.report import append_jsonl, read_jsonl
from tests.unit.report.test_row_formats import ROWS, TASK


def rows(*steps):
    return [{"step": step, "prompt_id": 0, "prompt": "p", "generated_text": f"at {step}"} for step in steps]


@pytest.fixture
def run(tmp_path):
    append_jsonl(tmp_path / "run" / "samples.jsonl", rows(0, 10))
    return tmp_path / "run"


def test_the_page_is_beside_the_rows(run, capsys):
    assert run_report([str(run)]) == 0
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
    assert run_report(arguments) == 0
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
        run_report(arguments)


def test_a_page_that_cannot_be_written_says_what_to_do(run):
    (run / "folder").mkdir()
    with pytest.raises(LockstepError, match=r"Is a directory.*Name a file that can be written with --output FILE"):
        run_report([str(run), "-o", str(run / "folder")])


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


def tail_rows(step):
    return [{"step": step, "prompt_id": n, "prompt": "p", "generated_text": f"answer {n} at {step}"} for n in range(3)]


def console(terminal):
    return Console(file=io.StringIO(), width=100, height=30, force_terminal=terminal, highlight=False, no_color=True)


@pytest.fixture
def followed(tmp_path):
    append_jsonl(tmp_path / "samples.jsonl", tail_rows(0))
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": 0.5}])
    return tmp_path


@pytest.mark.parametrize("terminal", [False, True])
def test_without_following_it_shows_what_is_there(followed, terminal):
    with open(followed / "samples.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 5, "prompt_id": 0, "prompt": "p", "generated_text": "last"}')
    shown = console(terminal)
    assert run_tail([str(followed), "--no-follow"], console=shown) == 0
    text = shown.file.getvalue()
    assert "train/loss" in text and "last" in text and "answer" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_it_follows_a_run_until_it_is_interrupted(followed, terminal):
    shown, looks = console(terminal), []

    def sleep(seconds):
        assert seconds == 0.5
        looks.append(shown.file.getvalue())
        if len(looks) == 2:
            append_jsonl(followed / "samples.jsonl", tail_rows(10))
        if len(looks) == 4:
            raise KeyboardInterrupt

    assert run_tail([str(followed), "--interval", "0.5", "--rows", "2"], console=shown, sleep=sleep) == 0
    assert "answer 1 at 0" in looks[0] and "answer 2" not in looks[0]
    assert looks[0] == looks[1] and looks[2] == looks[3]
    assert "answer 1 at 10" in looks[2][len(looks[1]) :] and "answer 0 at 0" not in looks[2][len(looks[1]) :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a run. See lockstep tail --help"),
        (["nowhere"], "nowhere does not exist"),
        (["x", "--rows", "0"], "--rows is 0; it must be at least 1"),
        (["x", "--follow", "--no-follow"], "not allowed with argument"),
    ],
)
def test_wrong_arguments_of_tail(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run_tail(arguments)


HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\x9b31m\r"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_hostile_file_does_not_move_the_terminal(tmp_path, terminal):
    """No control character but the colours of the view itself is printed."""
    row = {"step": 1, "prompt_id": 0, "generation_id": 0, "prompt": HOSTILE, "generated_text": HOSTILE, "num_tokens": 1}
    row |= {"finish_reason": HOSTILE, "mean_logprob": -1.0, f"score_{HOSTILE}": 1.0, f"note_{HOSTILE}": HOSTILE}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0}) + "\n")
    shown = console(terminal)
    assert run_tail([str(tmp_path), "--no-follow"], console=shown) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.file.getvalue()) if terminal else shown.file.getvalue()
    assert "title" in text and not set(text) & set("\x1b\x07\x9b\r")


@pytest.fixture
def with_tasks(tmp_path):
    append_jsonl(tmp_path / "run" / "samples.jsonl", ROWS)
    append_jsonl(tmp_path / "run" / "tasks.jsonl", [TASK])
    return tmp_path / "run"


def test_a_run_as_parquet(with_tasks, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run_convert([str(with_tasks), "--format", "parquet"]) == 0
    assert capsys.readouterr().out.split() == [str(with_tasks / "samples.parquet"), str(with_tasks / "tasks.parquet")]
    found = parquet.read_table(with_tasks / "samples.parquet").to_pylist()
    assert found == [{"judge": None, **row} for row in read_jsonl(with_tasks / "samples.jsonl")]


def test_a_directory_that_cannot_be_written_is_a_mistake(tmp_path):
    append_jsonl(tmp_path / "rows.jsonl", [{"prompt_id": 0, "step": 1, "generated_text": "a"}])
    with pytest.raises(ConfigError, match="--output PATH"):
        run_convert([str(tmp_path / "rows.jsonl"), "--format", "inspect", "--output", str(tmp_path / "rows.jsonl")])
