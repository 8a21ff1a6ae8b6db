import io
import json
import re

import pytest
from rich.console import Console

from lockstep.errors import ConfigError
from lockstep.main.tail import main
from lockstep.report import append_jsonl


def rows(step):
    return [{"step": step, "prompt_id": n, "prompt": "p", "generated_text": f"answer {n} at {step}"} for n in range(3)]


def console(terminal):
    return Console(file=io.StringIO(), width=100, height=30, force_terminal=terminal, highlight=False, no_color=True)


@pytest.fixture
def run(tmp_path):
    append_jsonl(tmp_path / "samples.jsonl", rows(0))
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": 0.5}])
    return tmp_path


@pytest.mark.parametrize("terminal", [False, True])
def test_without_following_it_shows_what_is_there(run, terminal):
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"step": 5, "prompt_id": 0, "prompt": "p", "generated_text": "last"}')
    shown = console(terminal)
    assert main([str(run), "--no-follow"], console=shown) == 0
    text = shown.file.getvalue()
    assert "train/loss" in text and "last" in text and "answer" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_it_follows_a_run_until_it_is_interrupted(run, terminal):
    shown, looks = console(terminal), []

    def sleep(seconds):
        assert seconds == 0.5
        looks.append(shown.file.getvalue())
        if len(looks) == 2:
            append_jsonl(run / "samples.jsonl", rows(10))
        if len(looks) == 4:
            raise KeyboardInterrupt

    assert main([str(run), "--interval", "0.5", "--rows", "2"], console=shown, sleep=sleep) == 0
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
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(arguments)


HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\x9b31m\r"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_hostile_file_does_not_move_the_terminal(tmp_path, terminal):
    """No control character but the colours of the view itself is printed."""
    row = {"step": 1, "prompt_id": 0, "generation_id": 0, "prompt": HOSTILE, "generated_text": HOSTILE, "num_tokens": 1}
    row |= {"finish_reason": HOSTILE, "mean_logprob": -1.0, f"score_{HOSTILE}": 1.0, f"note_{HOSTILE}": HOSTILE}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0}) + "\n")
    shown = console(terminal)
    assert main([str(tmp_path), "--no-follow"], console=shown) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.file.getvalue()) if terminal else shown.file.getvalue()
    assert "title" in text and not set(text) & set("\x1b\x07\x9b\r")
