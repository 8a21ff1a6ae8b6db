"""The command line."""

import errno
import json
import shlex
import signal
import subprocess
import sys
from unittest import mock

import pytest

from lockstep.errors import ConfigError
from lockstep.launch import without_debug
from lockstep.main import cli
from lockstep.main.commands import COMMANDS
from tests import tiny
from tests.tasks import write_tasks


@pytest.fixture(autouse=True)
def interrupts():
    """`cli.main` ends the process at Ctrl-C until a command runs."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_commands(capsys):
    assert cli.run(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f" {command.name} {command.summary}" in shown for command in COMMANDS)
    assert cli.run([]) == 2
    with pytest.raises(ConfigError, match="unknown command 'train'. .*Known commands: demo, train-lm, .*train-simpo"):
        cli.run(["train"])
    assert cli.run(["train-simpo", "--help"]) == 0
    assert "--gamma_beta_ratio" in capsys.readouterr().out


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep 0.")


@pytest.mark.parametrize("arguments", [["--help", "trainer"], ["--config_path", "none.yaml", "-h", "trainer"]])
def test_help_of_one_block(capsys, arguments):
    assert cli.run(["train-lm", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "--trainer.seed" in shown and "--inference_eval.seed" not in shown


def test_help_after_another_programs_words_is_that_programs(monkeypatch):
    given = []
    monkeypatch.setattr("lockstep.main.runs.run_export", lambda arguments: given.append(arguments) or 0)
    assert cli.run(["export", "--", "python", "--help"]) == 0
    assert given == [["--", "python", "--help"]]


@pytest.mark.parametrize(
    ("arguments", "rest", "debug"),
    [
        (["sample", "--debug", "--seed", "1"], ["sample", "--seed", "1"], True),
        (["sample", "--seed", "1"], ["sample", "--seed", "1"], False),
        (["launch", "--", "lockstep", "--debug"], ["launch", "--", "lockstep", "--debug"], False),
        (["launch", "--debug", "--", "lockstep", "--debug"], ["launch", "--", "lockstep", "--debug"], True),
    ],
)
def test_debug_is_taken_from_the_words_of_the_command_itself(arguments, rest, debug):
    assert without_debug(arguments) == (rest, debug)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_in_any_command_is_a_line_and_for_debugging_a_stack(monkeypatch, capsys, command, debug):
    def mistaken(self, arguments):
        raise ConfigError(f"{self.name} was given {arguments}")

    monkeypatch.setattr("lockstep.main.commands.Command.run", mistaken)
    words = ["--a", "1", *(["--debug"] if debug else [])]
    monkeypatch.setattr(sys, "argv", ["lockstep", command.name, *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    printed = capsys.readouterr().err
    given = words if command.own_help else words[:2]
    assert printed.splitlines()[-1] == f"error: {command.name} was given {given}"
    assert ("Traceback" in printed) == debug


@pytest.mark.parametrize("command", ["tail", "sample"])
def test_a_full_disk_ends_any_command_with_a_line(monkeypatch, capsys, command):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left", "rows"))
    monkeypatch.setattr("lockstep.main.commands.Command.run", full)
    monkeypatch.setattr(sys, "argv", ["lockstep", command])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == (
        f"error: [Errno {errno.ENOSPC}] No space left: 'rows'. Free space there, or choose another place.\n"
    )


STOPPED = """
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from lockstep.main.cli import main
main()
"""


@pytest.mark.parametrize(("module", "command"), [("lockstep.launch", "tail"), ("rich.live", "tail"), ("jax", "export")])
def test_ctrl_c_while_modules_are_imported_ends_a_command_without_a_word(module, command):
    words = [sys.executable, "-c", STOPPED.format(module=module), command, "runs"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_in_a_command_without_a_job_ends_it_with_130(monkeypatch, capsys):
    def interrupted(arguments):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("lockstep.main.results.run_tail", interrupted)
    monkeypatch.setattr(sys, "argv", ["lockstep", "tail", "runs"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"), [(["--help"], 0), (["completion", "bash"], 128 + signal.SIGPIPE)], ids=["help", "completion"]
)
def test_a_reader_that_leaves_early_sees_no_error(words, code):
    command = [sys.executable, "-c", "from lockstep.main.cli import main; main()", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", code)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A directory, of which no name can be written in ASCII, with a checkpoint, rows and tasks."""
    directory = tmp_path_factory.mktemp("läuft")
    tiny.save_checkpoint(str(directory / "checkpoints"))
    row = {"step": 0, "prompt_id": 0, "generation_id": 0, "prompt": "ß?", "generated_text": "→", "num_tokens": 1}
    row |= {"finish_reason": "stop", "mean_logprob": -0.5}
    (directory / "samples.jsonl").write_text(json.dumps(row) + "\n")
    write_tasks(directory / "tasks")
    return directory


ASCII, FULL = "PYTHONIOENCODING=ascii {command} > {out}/shown", "{command} > /dev/full"
CLOSED, READER = "{command} >&-", "{{ {command}; echo $? > {out}/code; }} | head -0; exit $(cat {out}/code)"
EVAL = (
    "eval {run}/checkpoints --tasks own_words --tasks.task_dir {run}/tasks --trainer.log_dir {out} --trainer.run_id e"
)
SAMPLE = "sample --checkpoint_path {run}/checkpoints --prompts [ß] --max_new_tokens 4 --trainer.log_dir {out}"
nightly = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shell", "made"),
    [
        ("report {run} --output {out}/ä.html", FULL, "ä.html"),
        ("convert {run} --format inspect --output {out}/ä", ASCII, "ä/*.json"),
        ("tail {run} --no-follow", ASCII, "shown"),
        pytest.param("check --json {out}/ä.json -- true", FULL, "ä.json", marks=nightly),
        ("export {run}/checkpoints {out}/ä", ASCII, "ä/config.json"),
        pytest.param("export {run}/checkpoints {out}/ä", CLOSED, "ä/config.json", marks=nightly),
        pytest.param(EVAL, READER, "e/scores.json", marks=nightly),
        pytest.param(EVAL, FULL, "e/scores.json", marks=nightly),
        pytest.param(SAMPLE + " --trainer.run_id s", FULL, "s/samples/samples.jsonl", marks=nightly),
        (SAMPLE + " --trainer.run_id s", READER, "s/samples/samples.jsonl"),
    ],
)
def test_what_stdout_cannot_take_ends_no_command(command, shell, made, results, tmp_path):
    if command is EVAL:
        pytest.importorskip("lm_eval")
    places = {"run": shlex.quote(str(results)), "out": shlex.quote(str(tmp_path))}
    program = shlex.join([sys.executable, "-c", "from lockstep.main.cli import main; main()"])
    line = shell.format(command=f"{program} {command.format(**places)}", **places)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob(made)) and "Traceback" not in done.stderr


def test_a_job_whose_terminal_is_closed_goes_on():
    """Python has None in place of such a stream, which the launcher asked whether it is a terminal."""
    program = shlex.join([sys.executable, "-m", "lockstep", "launch", "--", sys.executable, "-c", "print(1)"])
    assert subprocess.run(["sh", "-c", f"{program} <&- >&- 2>&-"]).returncode == 0
