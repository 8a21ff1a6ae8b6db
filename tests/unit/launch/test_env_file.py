"""Files of secrets."""

import argparse
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.env_file import job_environment, read_env_file


def test_what_a_line_may_be(tmp_path):
    path = tmp_path / "env"
    path.write_text("# a comment\n\nA=1\nexport B='two words'\nD=\"x=y\"\nE=$HOME#no\nF=\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "D": "x=y", "E": "$HOME#no", "F": ""}


@pytest.mark.parametrize("line", ["hf_secret_without_name", "1A=hf_secret", "A B=hf_secret", "A =hf_secret"])
def test_a_wrong_line_is_named_by_its_number_alone(tmp_path, line):
    path = tmp_path / "env"
    path.write_text(f"A=1\n{line}\n")
    with pytest.raises(ConfigError, match="line 2: it must be NAME=VALUE") as error:
        read_env_file(path)
    assert "hf_secret" not in str(error.value)


def test_what_is_secret(tmp_path):
    path = tmp_path / "env"
    path.write_text("A=from-file\nB=from-file\nSHORT=abc\n")
    given = [("A", "from-line"), ("WANDB_API_KEY", "typed-here"), ("PLAIN", "1")]
    found = job_environment(argparse.Namespace(env=given, env_file=path))
    assert found.public == {"A": "from-line", "PLAIN": "1"}
    assert found.secret == {"B": "from-file", "SHORT": "abc", "WANDB_API_KEY": "typed-here"}
    assert found.too_short == ["SHORT"]
    with pytest.raises(ConfigError, match="--env_file nowhere cannot be read"):
        job_environment(argparse.Namespace(env=[], env_file=Path("nowhere")))
