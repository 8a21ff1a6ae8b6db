"""``--help`` of every command: groups, defaults, an example that the command understands."""

import dataclasses
import functools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import draccus
import pytest
import yaml

from lockstep.configuration import refused_keys
from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.main.commands import COMMANDS, configured_commands, find_command, planned_commands
from lockstep.main.help import SHELLS, command_help, completion, key_groups, overview, script
from lockstep.main.runs import name_tasks
from scripts import make_config_docs

ROOT = Path(__file__).parents[3]


class Shape(draccus.ChoiceRegistry):
    """A choice."""


@Shape.register_subclass("round")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round(Shape):
    """A circle."""

    size: float = 1.0
    """How large it is, e.g. for 1. More than this is in the reference."""
    radius: float = 0.5


@Shape.register_subclass("square")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Square(Shape):
    """A square."""

    size: float = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """What is inside.

    Args:
        steps: The number of steps, 50 % of all.
    """

    steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """Everything."""

    inner: Inner = dataclasses.field(default_factory=Inner)
    """The inside."""
    shape: Shape | None = None
    """What it looks like."""
    name: str
    """Its name."""


@pytest.mark.parametrize("columns", [60, 90, 300])
def test_help_is_as_wide_as_the_terminal_and_no_wider_than_120(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for text in (overview(), *(command_help(find_command(name)) for name in ("eval", "report"))):
        lines = text.partition("\nexample:\n")[0].splitlines()
        widest = max(len(line) for line in lines if not line.startswith("  lockstep launch --processes 2"))
        assert min(columns, 120) - 20 < widest <= min(columns, 120)


def test_keys_are_in_groups_with_their_defaults_and_whole_texts():
    groups = {group.name: group for group in key_groups(Outer)}
    assert list(groups) == ["", "inner", "shape"]
    (steps,) = groups["inner"].keys
    assert (steps.name, steps.default, steps.text) == ("inner.steps", "1", "The number of steps, 50 % of all.")
    (name,) = groups[""].keys
    assert (name.name, name.default) == ("name", "required")


def test_a_block_with_a_type_has_the_keys_of_all_types():
    shape = next(group for group in key_groups(Outer) if group.name == "shape")
    shown = {key.name: (key.default, key.text) for key in shape.keys}
    assert shown == {
        "shape.type": ("", "which of these it is"),
        "shape.size": ("differs by type", "How large it is, e.g. for 1. More than this is in the reference."),
        "shape.radius": ("0.5", "type round: "),
    }


@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.own_help], ids=lambda each: each.name)
def test_every_command_shows_groups_defaults_and_an_example(command):
    text = command_help(command)
    assert text.startswith(f"usage: lockstep {command.name}")
    assert text.rstrip().endswith(f"example:\n  {command.example}")
    assert "--debug" in text and "\noptions:" in text
    if command.config_class is not None:
        assert "(default: " in text
    # Group titles' descriptions are kept as they are written; the keys are wrapped.
    assert max(len(line) for line in text.splitlines() if line.startswith("  --")) <= 120


def test_a_training_command_shows_every_key_of_its_reference():
    section = make_config_docs.render().partition("### `trainer`")[2].partition("\n###")[0]
    keys = re.findall(r"^\| `(\w+)` \| (?!block)", section, re.MULTILINE)
    assert len(keys) > 10
    text = command_help(find_command("train-lm"))
    assert [key for key in keys if f"--trainer.{key} " not in text] == []


REFUSED = {
    "data.validation_urls": "[x]",
    "data.length_buckets": "[4]",
    "data.cache_dir": "x",
    "data.require_end_token": "false",
    "trainer.steps_per_eval": "3",
    "trainer.per_device_eval_parallelism": "2",
}


@pytest.mark.parametrize("command", configured_commands().values(), ids=lambda each: each.name)
def test_the_whole_text_of_every_key_is_shown(command):
    shown = "".join(command_help(command).split())
    for group in key_groups(command.config()):
        for key in group.keys:
            assert "".join(key.text.split()) in shown, key.name
        assert "".join(group.text.split()) in shown, group.name


def test_a_key_that_a_command_refuses_is_in_no_table_of_it():
    grpo, lm = find_command("train-grpo"), find_command("train-lm")
    assert refused_keys(grpo.config()) == set(REFUSED) and not refused_keys(lm.config())
    listed = {key.name for group in key_groups(lm.config()) for key in group.keys}
    assert listed >= set(REFUSED) and not [key for key in REFUSED if f"--{key} " in command_help(grpo)]
    for key, value in REFUSED.items():
        with pytest.raises(ConfigError, match=rf"{key} is .*, which has no effect in train-grpo\. .*[.]$"):
            parse_arguments(grpo.config(), ["--config_path", "config/grpo_demo.yaml", f"--{key}", value])
    page = make_config_docs.render()
    own = page.partition("### `data` of `lockstep train-grpo`")[2].partition("\n###")[0]
    assert "`train_urls`" in own and "`cache_dir`" not in own and "`length_buckets`" not in own
    shared = page.partition("### `trainer`")[2].partition("\n###")[0]
    assert "\n| `steps_per_eval` (not of train-grpo) |" in shared and "\n| `seed` |" in shared


def test_one_block_alone():
    text = command_help(find_command("train-lm"), "inference_eval")
    assert "--inference_eval.eval_every N" in text and "--trainer.seed" not in text
    with pytest.raises(
        ConfigError, match="train-lm has no block 'inference'. Known blocks: data, trainer, .*inference_eval"
    ):
        command_help(find_command("train-lm"), "inference")


def test_the_overview_has_a_heading_for_each_purpose():
    text = overview()
    for command in COMMANDS:
        after = text.partition(f"\n{command.purpose}:\n")[2].partition("\n\n")[0]
        assert f"  {command.name} " in after
    assert re.search(r"make docs\b.*", text) and "\ndocs: " in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.name)
def test_an_example_is_a_command_line_of_its_command(command):
    program, name, *arguments = shlex.split(command.example.replace("\\\n", " "), comments=True)
    assert (program, name) == ("lockstep", command.name)
    files = [each for each in arguments if each.startswith("config/")]
    assert all((ROOT / each).exists() for each in files), files


# The keys of doctor's own are few: the others are of the run that it looks after (test_doctor.py).
OWN_KEYS = [command for command in configured_commands().values() if command.name != "doctor"]


@pytest.mark.parametrize("command", OWN_KEYS, ids=lambda each: each.name)
def test_the_keys_of_an_example_are_known(command):
    arguments = shlex.split(command.example)[2:]
    words = {"export": ["--checkpoint", "--output"], "convert": ["--run"]}.get(command.name, [])
    for index, key in enumerate(words):
        arguments.insert(2 * index, key)
    if command.name == "eval":
        arguments = name_tasks(arguments)
    arguments = [str(ROOT / each) if each.startswith("config/") else each for each in arguments]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    if "--tokenizer" not in given and command.name == "sample":
        assert yaml.safe_load(given["--prompts"]) == "questions.jsonl"
    assert isinstance(parse_arguments(command.config(), arguments), command.config())


def test_what_plan_takes_beside_a_configuration_is_in_its_help():
    text = command_help(find_command("plan"))
    assert "--topology NAME" in text and ",".join(planned_commands()) in text


BASH = """
source {file}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{function} lockstep "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

made = functools.cache(script)


@pytest.fixture(scope="module")
def bash_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "lockstep"
    file.write_text(made("bash"), encoding="utf-8")
    return file


def completed(file, *words):
    """What bash offers for the last of some words."""
    (function,) = re.findall(r"^complete .*-F (\w+) lockstep$", file.read_text(encoding="utf-8"), re.MULTILINE)
    quoted = " ".join(f"'{word}'" for word in ("lockstep", *words))
    text = BASH.format(file=file, words=quoted, function=function)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands(bash_file):
    assert set(completed(bash_file, "")) >= {command.name for command in COMMANDS}
    assert completed(bash_file, "train-s") == ["train-simpo"]


def test_bash_completes_keys_of_a_configuration_and_their_values(bash_file):
    assert completed(bash_file, "train-simpo", "--gamma") == ["--gamma_beta_ratio"]
    assert "--trainer.checkpointer.base_path" in completed(bash_file, "train-lm", "--trainer.checkpointer.")
    assert "--gamma_beta_ratio" not in completed(bash_file, "train-lm", "--")
    assert set(completed(bash_file, "train-lm", "--model.type", "")) >= {"llama", "qwen3"}
    assert completed(bash_file, "plan", "--topo") == ["--topology"]


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(shell, marks=pytest.mark.slow) for shell in SHELLS if shell != "bash")]
)
def test_every_shell_has_a_script_with_every_command(shell):
    text = made(shell)
    assert all(command.name in text for command in COMMANDS) and "gamma_beta_ratio" in text
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_an_unknown_shell_is_refused(arguments):
    with pytest.raises(ConfigError, match="it takes one of bash, zsh, fish"):
        completion(arguments)
