"""Fields of configurations hold the same whether YAML or Python gives them: numbers, texts, lists and paths."""

import collections.abc
import dataclasses
import pathlib
import re
import typing

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import InferenceEvalConfig
from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError
from lockstep.main.arguments import choices_of, decode_config, default_value, options_of
from lockstep.main.commands import configured_commands
from lockstep.training import TrainerConfig


def configurations(cls):
    """A configuration's class, and those of its blocks."""
    yield cls
    for hint in typing.get_type_hints(cls).values():
        inner = [hint, *typing.get_args(hint)]
        for option in (option for kind in inner for option in options_of(kind)):
            for block in choices_of(option).values() or [option]:
                if isinstance(block, type) and dataclasses.is_dataclass(block) and block is not cls:
                    yield from configurations(block)


CLASSES = sorted(
    {block for command in configured_commands().values() for block in configurations(command.config())}, key=repr
)
PATHS = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, hint in typing.get_type_hints(cls, include_extras=True).items()
    if str(FilePath) in str(hint)
]
NAMES_OF_PATHS = re.compile(
    r"(^|_)(path|dir|logdir|urls?|hf|checkpoint|tokenizer|output|json|model|run|prompts|calibration|calibrate|code)$"
)
OF_NO_PATHS = {"JudgeConfig.base_url", "JudgeConfig.model"} | {
    f"Train{kind}Config.model" for kind in ("Lm", "Preference", "Simpo", "Grpo")
}


def test_every_field_that_names_a_path_has_its_type():
    typed = {param.id for param in PATHS}
    names = {
        f"{cls.__name__}.{field.name}"
        for cls in CLASSES
        for field in dataclasses.fields(cls)
        if NAMES_OF_PATHS.search(field.name) and "str" in str(field.type)
    }
    assert len(typed) > 30 and not names - typed - OF_NO_PATHS


@pytest.mark.parametrize(("cls", "name"), PATHS)
def test_a_path_may_begin_with_the_home_directory(cls, name, monkeypatch):
    """In Python, and so in YAML, which makes the same objects: the check comes before all others."""
    monkeypatch.setenv("HOME", "/home/of/mine")

    hints = typing.get_type_hints(cls, include_extras=True)
    defaults = {field.name: default_value(field) for field in dataclasses.fields(cls)}
    needed = {key: typing.get_args(hints[key])[:1] for key, value in defaults.items() if value is dataclasses.MISSING}
    defaults |= {key: "".join(each for each in first if isinstance(each, str)) or "a" for key, first in needed.items()}

    def checked(value):
        config = object.__new__(cls)
        vars(config).update(defaults | {name: value})
        try:
            config.__post_init__()
        except (AttributeError, TypeError, ConfigError, ValueError):  # of further fields
            pass
        return getattr(config, name)

    path = "/home/of/mine/a/b.jsonl"
    if typing.get_origin(hints[name]) not in (list, tuple):
        assert [checked(value) for value in ("~/a/b.jsonl", path, "a/~b", "gs://a/~/b")] == [
            path,
            path,
            "a/~b",
            "gs://a/~/b",
        ]
        assert checked(pathlib.Path("~/a/b.jsonl")) == path
    else:
        assert list(checked(["~/a/b.jsonl", pathlib.Path("a")])) == [path, "a"]


def test_a_home_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="trainer.log_dir is '~nobody-at-all/runs', and that user's home directory"):
        TrainerConfig(log_dir="~nobody-at-all/runs")


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_a_scalar_of_an_array_library_is_a_number(value):
    config = InferenceEvalConfig(prompts=["a"], eval_every=value, temperature=np.float32(0.5), at_start=np.bool_(True))
    assert (config.eval_every, config.temperature, config.at_start) == (3, 0.5, True)
    assert [type(each) for each in (config.eval_every, config.temperature, config.at_start)] == [int, float, bool]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"eval_every": 1.5}, "eval_every is 1.5; it must be a whole number"),
        ({"eval_every": np.float64(2.0)}, "eval_every is 2.0; it must be a whole number"),
        ({"eval_every": True}, "eval_every is True; it must be a whole number"),
        ({"eval_every": "10"}, "eval_every is '10'; it must be a whole number"),
        ({"max_seq_len": 12.5}, "max_seq_len is 12.5; it must be a whole number or null"),
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"at_start": "yes"}, "at_start is 'yes'; it must be true or false"),
        ({"prompt_field": 3}, "prompt_field is 3; it must be a text"),
        ({"stop": "end"}, r"stop is 'end'; it must be a list. Use \['end'\]"),
        ({"metrics": [3]}, r"metrics\[0\] is 3; it must be a text"),
        ({"on_error": "stop"}, "on_error is 'stop'; it must be one of skip, raise"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(values, text):
    with pytest.raises(ConfigError, match=rf"inference_eval\.{text}(\. Correct it)?\."):
        InferenceEvalConfig(**{"prompts": ["a"]} | values)


class ListConfig(collections.abc.Sequence):
    """Like omegaconf's, and like a column of `datasets`: a sequence that is neither list nor tuple."""

    def __init__(self, items):
        self._items = items

    def __getitem__(self, index):
        return self._items[index]

    def __len__(self):
        return len(self._items)


class DictConfig(collections.UserDict):
    """Like omegaconf's: a mapping that is no dict."""


class Series:
    """Like pandas': no sequence, but one of its values can be had as a list."""

    def __init__(self, items):
        self._items = items

    def tolist(self):
        return list(self._items)


QUESTION = {"prompt": "b", "answer": "c"}


@pytest.mark.parametrize(
    "prompts",
    [
        ListConfig(["a", DictConfig(QUESTION)]),
        Series(["a", QUESTION]),
        np.array(["a", QUESTION], object),
        ("a", QUESTION),
    ],
)
def test_a_column_and_a_list_of_another_library_are_lists(prompts):
    config = InferenceEvalConfig(prompts=prompts)
    assert list(config.prompts) == ["a", QUESTION]
    assert type(config.prompts[1]) is dict


def test_what_is_left_alone_is_the_same_object():
    prompts = ["a", QUESTION]
    assert InferenceEvalConfig(prompts=prompts).prompts is prompts


def test_a_class_whose_annotations_have_no_meaning_here_is_left_alone():
    @dataclasses.dataclass
    class Mine:
        path: "NotImportedHere"  # noqa: F821

    check_fields(Mine("~/a"))


def test_yaml_and_python_are_refused_alike():
    for value in (1.5, "x", [1]):
        with pytest.raises(ConfigError, match="eval_every"):
            decode_config(InferenceEvalConfig, {"prompts": ["a"], "eval_every": value}, "x.yaml")
        with pytest.raises(ConfigError, match="eval_every"):
            InferenceEvalConfig(prompts=["a"], eval_every=value)
