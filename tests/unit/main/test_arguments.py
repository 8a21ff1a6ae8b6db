import dataclasses
import sys
from typing import Any

import draccus
import pytest

from lockstep.batch_inference.config import SampleConfig
from lockstep.errors import ConfigError
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.plugins import load_object


class Shape(draccus.ChoiceRegistry):
    """A choice."""


@Shape.register_subclass("round")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round(Shape):
    radius: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    steps: int = 1

    def __post_init__(self):
        if self.steps < 1:
            raise ConfigError(f"inner.steps is {self.steps}; it must be at least 1. Raise it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    shape: Shape | None = None
    shapes: Shape | tuple[Shape, ...] = ()
    text: str | list[str | dict[str, int]] = "x"
    tags: tuple[str, ...] = ()
    sizes: list[int] | None = None
    most: int | None = None
    free: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str


def test_the_command_line_wins_over_the_file_and_later_over_earlier(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: a\ninner: {steps: 2}\nshape: {type: round, radius: 3e-1}\n")
    arguments = ["--config_path", str(path), "--inner.steps", "3", "--inner.steps=4", "--shape.radius", "5"]
    config = parse_arguments(Outer, arguments)
    assert (config.name, config.inner.steps, config.shape) == ("a", 4, Round(radius=5.0))
    assert parse_arguments(Outer, ["--config_path", str(path)]).shape == Round(radius=0.3)


def test_a_module_beside_the_file_that_names_it_is_found_and_takes_no_ones_place(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "judge_beside.py").write_text("def score(row, prompt):\n    return 1.0\n")
    path = tmp_path / "c.yaml"
    path.write_text("name: a\n")
    parse_arguments(Outer, ["--config_path", str(path)])
    assert str(tmp_path) not in sys.path
    path.write_text("name: judge_beside:score\n")
    name = parse_arguments(Outer, ["--config_path", str(path)]).name
    assert load_object(name, "reward")(None, None) == 1.0 and sys.path.index(str(tmp_path)) == len(sys.path) - 1
    sys.path.remove(str(tmp_path))
    path.write_text("name: a\n")
    parse_arguments(Outer, ["--config_path", str(path), "--name", "judge_beside:score"])
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize("text", ["007", "2026_11_26", "12:30", "1e3", "0x10", "1.50"])
def test_a_text_that_yaml_takes_for_a_number_stays_as_it_is_written(tmp_path, text):
    assert parse_arguments(Outer, ["--name", text, "--tags", f"[{text}]"]) == Outer(name=text, tags=(text,))
    (tmp_path / "c.yaml").write_text(f"name: {text}\nfree: {{a: [1.50, 010]}}\ninner: {{steps: 010}}\n")
    config = parse_arguments(Outer, ["--config_path", str(tmp_path / "c.yaml")])
    assert config.name == text and config.inner.steps == 8
    assert config.free == {"a": [1.5, 8]} and [type(each) for each in config.free["a"]] == [float, int]


def test_what_a_file_says_twice_is_refused_and_an_alias_is_changed_in_one_place(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: a\ninner: {steps: 2}\nshape: {type: round}\ninner: {}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml is not YAML: the key 'inner' is twice, line 4"):
        parse_arguments(Outer, ["--config_path", str(path)])
    path.write_text("name: a\nfree: &one {k: 1}\ntext: [*one, {<<: *one, k: 3}]\n")
    config = parse_arguments(Outer, ["--config_path", str(path), "--free.k", "2"])
    assert config == Outer(name="a", free={"k": 2}, text=[{"k": 1}, {"k": 3}])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["name", "a"], "argument 'name' was not expected"),
        (["--config", "a.yaml"], "argument '--config' was not expected. Write --config_path FILE"),
        (["--name"], "argument --name has no value"),
        (["--name", "--inner.steps", "1"], "argument --name has no value"),
        (["--name", "[a"], "not YAML"),
        (["--name", "run #3"], "--name has the value 'run #3', which is not YAML: what follows # is a comment. Quote"),
        (["--name", "#"], "what follows # is a comment"),
        (["--tags", "[a]", "--tags.0", "b"], r"--tags.0: tags is a list in the file. Give all of it: --tags '\[…\]'"),
        (["--config_path", "none.yaml"], "none.yaml cannot be read"),
    ],
)
def test_arguments_that_cannot_be_read(arguments, text):
    with pytest.raises(ConfigError, match=text):
        parse_arguments(Outer, arguments)


def test_dates_and_equals_signs_are_texts_and_a_hash_in_quotes_is_no_comment():
    config = parse_arguments(Outer, ["--name", "2026-11-30", "--tags", "[=, 2026-11-30 12:00:00, '#']"])
    assert (config.name, config.tags) == ("2026-11-30", ("=", "2026-11-30 12:00:00", "#"))


def test_first_words_get_their_keys():
    keys, usage = ["checkpoint", "output"], "lockstep export CHECKPOINT OUTPUT"
    assert name_words(["a", "--dtype", "bfloat16", "b", "--step=3", "--last"], keys, usage) == [
        *("--checkpoint", "a"), *("--dtype", "bfloat16"), *("--output", "b"), "--step=3", "--last",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'c' is one word too many: lockstep export CHECKPOINT OUTPUT"):
        name_words(["a", "b", "c"], keys, usage)


def test_a_type_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("trainer: {tracker: {type: [jsonl]}}\n")
    with pytest.raises(ConfigError, match="'trainer.tracker.type' is \\['jsonl'\\]"):
        parse_arguments(SampleConfig, ["--config_path", str(path)])
