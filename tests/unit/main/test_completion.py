"""The completion scripts of the shells."""

import functools
import re
import shutil
import subprocess

import pytest

from lockstep.errors import ConfigError
from lockstep.main.commands import COMMANDS
from lockstep.main.completion import SHELLS, main, script

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
        main(arguments)
