"""Decoding, and what fields say of themselves; the files that are decoded are tested by way of arguments too."""

import dataclasses
import typing

import pytest

from lockstep.batch_inference import EvalConfig
from lockstep.batch_inference.config import SampleConfig
from lockstep.configuration import decode_config, default_value, field_texts, first_paragraph, options_of, read_yaml
from lockstep.errors import ConfigError
from lockstep.training import TrainGrpoConfig, TrainLmConfig
from lockstep.training.checkpoints.config import KeepConfig
from lockstep.training.loop.config import TrainerConfig
from tests.unit.main.test_arguments import Outer, Round


def test_a_text_or_a_list_stays_what_it_is():
    assert decode_config(Outer, {"name": "a", "tags": "demo"}, "here").tags == ("demo",), "not its letters"
    assert decode_config(Outer, {"name": 7, "text": "y"}, "here") == Outer(name="7", text="y")
    assert decode_config(Outer, {"name": "a", "text": ["y", {"z": 1}]}, "here").text == ["y", {"z": 1}]
    assert decode_config(Outer, {"name": "a", "shapes": [{"type": "round"}]}, "here").shapes == (Round(),)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"nam": "a"}, r"here: unknown key 'nam'. Did you mean 'name'\? Known keys here: free, inner, most, name"),
        ({"name": "a", "inner": {"stepps": 1}}, r"unknown key 'inner.stepps'. Did you mean 'steps'\?"),
        ({"name": "a", "shape": {"type": "rund"}}, r"'shape.type' is 'rund'. Did you mean 'round'\?"),
        ({"name": "a", "shape": {"type": "round", "radios": 1}}, r"'shape.radios'. Did you mean 'radius'\?"),
        ({"name": "a", "shapes": [{"type": "round", "x": 1}]}, r"unknown key 'shapes.0.x'"),
        ({"name": "a", "inner": {"steps": 0}}, r"inner.steps is 0; it must be at least 1"),
        ({"name": "a", "inner": {"steps": "many"}}, r"'inner.steps' is 'many'; it must be a whole number\. Correct it"),
        ({"name": "a", "inner": {"steps": "1e3"}}, r"'inner.steps' is '1e3'; it must be a whole number\. Write 1000\."),
        ({"name": "a", "inner": {"steps": "1,000"}}, r"'inner.steps' is '1,000'; .* Write 1000\."),
        ({"name": "a", "most": "auto"}, r"'most' is 'auto'; it must be a whole number or null\. Write null"),
        ({"name": ["a"]}, r"'name' is \['a'\]; it must be a text\. Put it in quotes"),
        ({"name": {"What is": "it?"}}, r"'name' is \{'What is': 'it\?'\}; it must be a text\. Put it in quotes"),
        (
            {"name": "a", "tags": {"0": "b"}},
            r"'tags' is \{'0': 'b'\}; it must be a list\. Write all of it: \[first, sec",
        ),
        ({"name": "a", "tags": {"b": None}}, r"it must be a list\. Write all of it: \[b\]"),
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
