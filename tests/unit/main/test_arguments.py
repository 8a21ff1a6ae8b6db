import dataclasses
import sys
import typing
from typing import Any

import draccus
import pytest

from lockstep.batch_inference.config import SampleConfig
from lockstep.errors import ConfigError
from lockstep.main.arguments import (
    decode_config,
    default_value,
    field_texts,
    first_paragraph,
    name_words,
    options_of,
    parse_arguments,
)
from lockstep.main.runs import EvalConfig
from lockstep.main.yaml_values import read_yaml
from lockstep.plugins import load_object
from lockstep.training import TrainGrpoConfig, TrainLmConfig
from lockstep.training.checkpoints.config import KeepConfig
from lockstep.training.loop.config import TrainerConfig


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


def test_a_text_or_a_list_stays_what_it_is():
    assert decode_config(Outer, {"name": "a", "tags": "demo"}, "here").tags == ("demo",), "not its letters"
    assert decode_config(Outer, {"name": 7, "text": "y"}, "here") == Outer(name="7", text="y")
    assert decode_config(Outer, {"name": "a", "text": ["y", {"z": 1}]}, "here").text == ["y", {"z": 1}]
    assert decode_config(Outer, {"name": "a", "shapes": [{"type": "round"}]}, "here").shapes == (Round(),)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"nam": "a"}, r"here: unknown key 'nam'. Did you mean 'name'\? Known keys here: free, inner, name, shape"),
        ({"name": "a", "inner": {"stepps": 1}}, r"unknown key 'inner.stepps'. Did you mean 'steps'\?"),
        ({"name": "a", "shape": {"type": "rund"}}, r"'shape.type' is 'rund'. Did you mean 'round'\?"),
        ({"name": "a", "shape": {"type": "round", "radios": 1}}, r"'shape.radios'. Did you mean 'radius'\?"),
        ({"name": "a", "shapes": [{"type": "round", "x": 1}]}, r"unknown key 'shapes.0.x'"),
        ({"name": "a", "inner": {"steps": 0}}, r"inner.steps is 0; it must be at least 1"),
        ({"name": "a", "inner": {"steps": "many"}}, r"inner.steps.*'many'"),
        ({"name": ["a"]}, r"name.*Expected a text, got \['a'\]"),
        ({"name": True}, r"here: 'name' is True to YAML; it must be a text\. Put it in quotes"),
        ({"name": None}, r"here: 'name' is null \(no value\)\. Give it one, or remove the line"),
        ({"name": "a", "inner": None}, r"here: 'inner' is null"),
        ({"name": "a", "inner": {"steps": None}}, r"here: 'inner.steps' is null"),
        ({"name": "a", "sizes": "8"}, r"here: 'sizes' is the text '8'; it must be a list\. Write \[8\]"),
        ({"name": "a", "text": [True]}, r"here: 'text.0' is True to YAML"),
        ({}, r"Missing required field\(s\) `name`"),
    ],
)
def test_what_is_wrong_is_named(values, text):
    with pytest.raises(ConfigError, match=text):
        decode_config(Outer, values, "here")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["name", "a"], "argument 'name' was not expected"),
        (["--name"], "argument --name has no value"),
        (["--name", "--inner.steps", "1"], "argument --name has no value"),
        (["--name", "[a"], "not YAML"),
        (["--config_path", "none.yaml"], "none.yaml cannot be read"),
    ],
)
def test_arguments_that_cannot_be_read(arguments, text):
    with pytest.raises(ConfigError, match=text):
        parse_arguments(Outer, arguments)


def test_first_words_get_their_keys():
    keys, usage = ["checkpoint", "output"], "lockstep export CHECKPOINT OUTPUT"
    assert name_words(["a", "--dtype", "bfloat16", "b", "--step=3", "--last"], keys, usage) == [
        *("--checkpoint", "a"), *("--dtype", "bfloat16"), *("--output", "b"), "--step=3", "--last",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'c' is one word too many: lockstep export CHECKPOINT OUTPUT"):
        name_words(["a", "b", "c"], keys, usage)


@pytest.mark.parametrize(
    "tag", ["!!python/tuple [1]", "!!python/object/apply:os.system [exit]", "!include /etc/hostname"]
)
def test_a_file_makes_no_objects_and_reads_no_other_files(tmp_path, tag):
    path = tmp_path / "c.yaml"
    path.write_text(f"a: {tag}\n")
    with pytest.raises(ConfigError, match="c.yaml is not YAML"):
        read_yaml(str(path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "a: &a [0, 0]\n" + "".join(f"k{n}: &k{n} [*{'a' if n == 0 else f'k{n - 1}'}, *a]\n" for n in range(500)),
            "values",
        ),
        ("a: &a [*a]\n", "more than 100,000 values"),
        ("a: " + "x" * (600 << 10), "more than 524,288 bytes"),
        ("[" * 60_000, "is not YAML"),
    ],
    ids=["aliases", "endless", "long", "deep"],
)
def test_a_file_takes_no_more_than_a_configuration_does(tmp_path, text, why):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_yaml(str(path))


def test_a_type_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("trainer: {tracker: {type: [jsonl]}}\n")
    with pytest.raises(ConfigError, match="'trainer.tracker.type' is \\['jsonl'\\]"):
        parse_arguments(SampleConfig, ["--config_path", str(path)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A base.

    Args:
        first: The first one. None: no
            first.
        second: Described here.
    """

    first: int | None = None
    second: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """A class that
    goes on.

    And says more.
    """

    second: str = "x"
    """Described ``again``."""
    third: list[int] = dataclasses.field(default_factory=lambda: [1])


def test_a_field_has_the_text_of_the_last_class_that_says_something():
    assert field_texts(Derived) == {"first": "The first one. null: no first.", "second": "Described `again`."}
    assert field_texts(Base)["second"] == "Described here."


def test_the_rest():
    assert first_paragraph(Derived) == "A class that goes on."
    assert options_of(int | None) == [int] and options_of(str) == [str]
    defaults = {field.name: default_value(field) for field in dataclasses.fields(Derived)}
    assert defaults == {"first": None, "second": "x", "third": [1]}
    assert default_value(dataclasses.fields(Base)[1]) is dataclasses.MISSING


def blocks_of(cls, prefix=()):
    """The path of every key of a configuration whose value can be a block alone."""
    for name, hint in typing.get_type_hints(cls).items():
        kinds = options_of(hint)
        if name in {field.name for field in dataclasses.fields(cls)} and all(map(dataclasses.is_dataclass, kinds)):
            yield (*prefix, name)
            yield from blocks_of(kinds[0], (*prefix, name))


@pytest.mark.parametrize("cls", [SampleConfig, TrainLmConfig, TrainGrpoConfig, EvalConfig])
@pytest.mark.parametrize("value", [[{"every": 70, "until": 9}], [], "text", 5, True])
def test_what_is_no_block_where_one_is_wanted_is_named_with_its_keys_and_an_example(cls, value):
    paths = list(blocks_of(cls))
    assert paths
    for path in paths:
        values = value
        for name in reversed(path):
            values = {name: values}
        with pytest.raises(ConfigError) as caught:
            decode_config(cls, values, "mine.yaml")
        text = str(caught.value)
        if path[-1] == "keep" and isinstance(value, list):
            assert "checkpointer.keep is the list" in text and "Write keep: {newest: 2, every: 1000}" in text
        else:
            assert f"mine.yaml: {'.'.join(path)!r} is " in text and "it must be a block with keys (" in text
            assert f"Write e.g. {path[-1]}: {{" in text and "object has no attribute" not in text


@pytest.mark.parametrize("entry", [{"every": 2000}, {"every": 2000, "until": None}])
def test_levanters_list_of_checkpoints_that_stay_is_read_where_it_means_the_same(entry):
    config = decode_config(TrainerConfig, {"checkpointer": {"keep": [entry]}}, "mine.yaml")
    assert config.checkpointer is not None and config.checkpointer.keep == KeepConfig(every=2000)
