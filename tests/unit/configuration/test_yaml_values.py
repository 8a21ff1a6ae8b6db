"""What is refused of a file of YAML; most of it is tested by way of arguments."""

import os
import threading
import traceback

import pytest

from lockstep.configuration import yaml_values
from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.training import TrainLmConfig


@pytest.mark.parametrize("text", ["judge:\n  api_key: 'hunter2\n  model: x\n", "a: [hunter2\n", "password: %hunter2\n"])
def test_an_error_of_the_parser_shows_no_line_of_the_file(tmp_path, text):
    """A configuration may have a password."""
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml is not YAML: .*, line \d+, column \d+\. Correct") as caught:
        parse_arguments(TrainLmConfig, ["--config_path", str(tmp_path / "run.yaml")])
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConfigError, match=r"--judge.api_key has a value, which is not YAML: ") as caught:
        parse_arguments(TrainLmConfig, ["--judge.api_key", "[hunter2"])
    assert "hunter2" not in str(caught.value)


def test_a_pipe_is_read_where_somebody_writes_to_it(tmp_path, monkeypatch):
    """Bash's ``--config_path <(…)`` is one."""
    path = tmp_path / "run.yaml"
    os.mkfifo(path)
    monkeypatch.setattr(yaml_values, "PIPE_S", 0.01)
    with pytest.raises(
        ConfigError, match=r"run\.yaml cannot be read: it is a pipe, and nothing was written to it within"
    ):
        yaml_values.read_yaml(str(path))
    monkeypatch.setattr(yaml_values, "PIPE_S", 60.0)
    writer = threading.Thread(target=path.write_text, args=("seed: 1",))
    writer.start()
    assert yaml_values.read_yaml(str(path)) == ({"seed": 1}, "seed: 1")
    writer.join()


def test_merges_of_merges_are_refused_before_they_fill_the_memory(tmp_path):
    lines = [
        "a0: &a0 {k: 1}",
        *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]}}" for n in range(1, 30)),
    ]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100,000 values are merged here, line"):
        parse_arguments(TrainLmConfig, ["--config_path", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("seed: 1".encode("utf-16"), "run.yaml is no text in UTF-8 .* at byte 0.. Save it so"),
        (
            "a:\n\u00a0\u00a0b: 1\n  c: 1\n".encode(),
            r"is not YAML: .* Replace its no-break spaces \(U\+00A0\) by spaces",
        ),
        (b"a: !include /etc/hostname\n", "constructor for the tag '!include', line 1"),
    ],
)
def test_what_editors_and_web_pages_put_into_a_file_is_named(tmp_path, data, text):
    (tmp_path / "run.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=text):
        parse_arguments(TrainLmConfig, ["--config_path", str(tmp_path / "run.yaml")])
