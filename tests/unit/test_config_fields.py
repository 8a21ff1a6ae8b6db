"""Fields of configurations hold the same whether YAML or Python gives them: numbers, texts, lists and paths."""

import argparse
import collections.abc
import contextlib
import dataclasses
import enum
import importlib
import json
import re
import time
import types
import typing
from pathlib import Path
from types import SimpleNamespace

import draccus
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.door import is_bearable

from lockstep import InferenceEvalConfig, Request, SamplingParams
from lockstep.config_fields import FilePath, check_fields, encode_config, option_path
from lockstep.configuration import choices_of, decode_config, default_value, options_of, read_yaml
from lockstep.errors import ConfigError
from lockstep.main.commands import COMMANDS, configured_commands
from lockstep.main.runs import SampleConfig
from lockstep.models import LlamaConfig, ModelConfig, RotaryConfig
from lockstep.report import TrackerConfig
from lockstep.report.trackers import JsonlTrackerConfig, WandbTrackerConfig
from lockstep.report.trackers.tensorboard import TensorboardTrackerConfig
from lockstep.training import (
    PreferenceObjective,
    RewardConfig,
    TrainerConfig,
    TrainGrpoConfig,
    TrainLmConfig,
    TrainSimpoConfig,
)


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


def values_of(cls):
    """The values of a configuration's fields: its defaults, and for the others something that has their type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {field.name: default_value(field) for field in dataclasses.fields(cls)}
    return {name: something(hints[name]) if value is dataclasses.MISSING else value for name, value in values.items()}


def something(hint):
    hint = hint.__value__ if isinstance(hint, typing.TypeAliasType) else hint
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Literal:
        return inner[0]
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return something(inner[0])
    if origin is collections.abc.Callable:
        return len
    if dataclasses.is_dataclass(origin):
        return object.__new__(origin)
    known = {str: "a", int: 1, float: 1.0, bool: True, list: [], tuple: (), dict: {}, collections.abc.Mapping: {}}
    return known[origin]


NAMES_OF_PATHS = re.compile(
    r"(^|_)(path|dir|directory|logdir|file|urls?|hf|checkpoint|tokenizer|output|json|html|model|run|prompts|calibration|calibrate|code)$"
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

    def checked(value):
        config = object.__new__(cls)
        vars(config).update(values_of(cls) | {name: value})
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
        assert checked(Path("~/a/b.jsonl")) == path
    else:
        assert list(checked(["~/a/b.jsonl", Path("a")])) == [path, "a"]


def public_dataclasses():
    """Every dataclass that has a public name, by that name."""
    for line in (Path(__file__).parents[1] / "golden" / "public_names.txt").read_text().splitlines():
        module, _, name = line.partition("(")[0].rpartition(".")
        with contextlib.suppress(ImportError):  # the line is of a method
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and dataclasses.is_dataclass(found):
                yield found


RESULTS = {
    *("Completion", "RoutedExperts", "TaskResults", "AuditResult", "Generation", "Sizing", "DecodeModel", "Row"),
    *("SampleRow", "RunFiles", "Answer", "SavedModel", "StepInfo", "ReaderCheck", "ModelPreset", "SavedTensor"),
    *("Alarm", "Share"),
    "DataFormat",  # made of another one, by its methods
}
"""What lockstep makes and nobody else."""
ARRAYS = {
    *("DecoderWeights", "LayerWeights", "LlamaLMHeadModel", "LoraModel", "LazyWeight", "EngineRouting", "MergeLora"),
    *("DecodeMesh", "LeafLayout", "QuantizedLayout", "QuantizedWeight", "TokenizedRows"),
}
"""What has arrays or placements in it, whose types jaxtyping and JAX check."""
OTHER_ERRORS = {"Prompt"}  # its errors are those of prompts
WRONG = [None, True, 3, 1.5, "no", Path("no"), [object()], {"a": object()}, object()]
CHECKED = [
    cls
    for cls in sorted({*public_dataclasses(), *CLASSES}, key=repr)
    if cls.__name__ not in RESULTS | ARRAYS | OTHER_ERRORS and dataclasses.fields(cls)
]


def may_be(value, hint):
    """Whether a field of this type takes a value, by another reader of types; a whole number is a number too."""
    text = isinstance(value, Path) and "str" in str(hint)
    number = type(value) is int and is_bearable(1.5, hint)
    return text or number or is_bearable(value, hint)


@pytest.mark.parametrize("cls", CHECKED, ids=lambda cls: cls.__name__)
def test_a_wrong_type_in_python_is_an_error_that_names_the_field(cls):
    hints, values = typing.get_type_hints(cls, include_extras=True), values_of(cls)
    for field in dataclasses.fields(cls):
        for value in WRONG:
            if may_be(value, hints[field.name]):
                continue
            config = object.__new__(cls)
            vars(config).update(values | {field.name: value})
            with pytest.raises(ConfigError, match=rf"\b{field.name}\b(\[0\]|\.a)? is .*; it must (be|have) "):
                config.__post_init__()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.options], ids=lambda each: each.name)
def test_every_option_that_names_a_path_has_its_type(command, monkeypatch):
    """No shell expands ``~`` in ``--output=~/FILE``."""
    monkeypatch.setenv("HOME", "/home/of/mine")
    parser = argparse.ArgumentParser(conflict_handler="resolve", add_help=False)
    command.add_options(parser)
    for option in parser._actions:
        if option.option_strings and NAMES_OF_PATHS.search(option.dest) and option.dest not in OPTIONS_OF_NO_PATHS:
            assert option.type is option_path, option.option_strings
            assert parser._get_value(option, "~/a") == Path("/home/of/mine/a")
    with pytest.raises(argparse.ArgumentTypeError, match="~nobody-at-all/a', and that user's home directory"):
        option_path("~nobody-at-all/a")


@pytest.mark.parametrize("path", ["$HOME/a", "${HOME}/a", "gs://a/$USER", "${oc.env:HOME}/a"])
def test_a_path_with_a_variable_of_a_shell_is_refused_unless_it_exists(path, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"log_dir is '.*', and variables of a shell mean nothing in it"):
        TrainerConfig(log_dir=path)
    monkeypatch.chdir(tmp_path)
    Path("$a").touch()
    assert [TrainerConfig(log_dir=name).log_dir for name in ("$a", "a$", "a$.b")] == ["$a", "a$", "a$.b"]


@pytest.mark.parametrize("text", ["None", "none"])
def test_the_text_none_is_no_value_of_a_key_that_may_be_null(text):
    with pytest.raises(ConfigError, match=f"run_id is the text '{text}'; no value is written null in YAML, None in Py"):
        TrainerConfig(run_id=text)
    assert TrainerConfig(run_id="none-2").run_id == "none-2"


OPTIONS_OF_NO_PATHS = {"model", "tokenizer", "dry_run"}
"""Names, or directories that their readers expand; and a switch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathReward(RewardConfig):
    """As a user may write it: with paths by the types of the standard library."""

    words: Path
    more: tuple[Path, ...] = ()
    either: str | Path | None = None
    place: FilePath = "gs://bucket/words"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathTracker(TrackerConfig):
    words: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathObjective(PreferenceObjective):
    words: Path | None = None


def test_paths_of_a_users_own_classes_are_whole_when_they_are_given(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/of/mine")
    monkeypatch.chdir(tmp_path)
    reward = PathReward(words="~/a", more=["b", Path("~/c")], either="d", place="~/e")
    assert reward.words == Path("/home/of/mine/a") and reward.more == (tmp_path / "b", Path("/home/of/mine/c"))
    assert reward.either == str(tmp_path / "d") and reward.place == "/home/of/mine/e"
    assert PathReward(words=tmp_path, either=Path("d")).either == tmp_path / "d"
    values = {"type": f"{__name__}:PathReward", "words": "~/a", "more": ["b"], "either": "gs://bucket/d"}
    (decoded,) = decode_config(Rewards, {"rewards": [values]}, "run.yaml").rewards
    assert (decoded.words, decoded.more) == (Path("/home/of/mine/a"), (tmp_path / "b",))
    assert decoded.either == "gs://bucket/d"
    for cls in (PathTracker, PathObjective):
        assert cls(words="~/a").words == Path("/home/of/mine/a")
    with pytest.raises(ConfigError, match=r"rewards: words is 3; it must be a path\. Correct it"):
        PathReward(words=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewards:
    rewards: list[RewardConfig]


def test_a_relative_directory_of_tensorboard_stays_where_it_was_given(monkeypatch, tmp_path):
    pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    tracker = TensorboardTrackerConfig(logdir="curves").build("runs/a", "a")
    beside = TensorboardTrackerConfig().build("runs/b", "b")
    monkeypatch.chdir(tmp_path / "elsewhere")
    for each in (tracker, beside):
        each.log({"loss": 1.0}, step=1)
        each.rewind(step=1, rounds_step=1, rounds=())
        each.finish()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert len(list(tmp_path.glob("curves/a/*"))) == len(list(tmp_path.glob("runs/b/tensorboard/*"))) == 1


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


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), np.array(3)])
def test_sampling_and_models_take_numbers_of_other_libraries(number):
    params = SamplingParams(
        max_new_tokens=number,
        temperature=np.float32(0.5),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([1, 2]),
        logit_bias=[[np.int32(1), np.float64(0.5)]],
        stop=ListConfig(["a"]),
    )
    assert params == SamplingParams(
        max_new_tokens=3, temperature=0.5, ignore_eos=True, stop_token_ids=(1, 2), logit_bias=((1, 0.5),), stop=("a",)
    )
    assert type(params.max_new_tokens) is int and hash(params)
    request = Request(prompt_id=number, prompt_tokens=np.array([5, 6]), params=params)
    assert request.prompt_tokens == (5, 6) and hash(request)
    config = LlamaConfig(num_layers=number, rope=RotaryConfig(theta=np.float64(1e4)))
    assert (config.num_layers, type(config.num_layers), type(config.rope.theta)) == (3, int, float)


def test_many_tokens_are_looked_at_at_once():
    tokens = tuple(range(1_000_000))
    begin = time.process_time()
    assert Request(prompt_id=0, prompt_tokens=tokens, params=SamplingParams(max_new_tokens=1)).prompt_tokens is tokens
    assert time.process_time() - begin < 2


COMMANDS_BY_FILE = {
    "config/demo.yaml": TrainLmConfig,
    "config/grpo_demo.yaml": TrainGrpoConfig,
    "config/simpo_tiny.yaml": TrainSimpoConfig,
    "config/sampler/demo.yaml": SampleConfig,
}


@pytest.mark.parametrize("file", COMMANDS_BY_FILE)
def test_what_is_encoded_is_decoded_again(file):
    config = decode_config(COMMANDS_BY_FILE[file], read_yaml(file)[0], file)
    values = json.loads(json.dumps(encode_config(config)))
    assert decode_config(COMMANDS_BY_FILE[file], values, "the values") == config


@pytest.mark.parametrize("name", ModelConfig.get_known_choices())
def test_a_model_is_encoded_as_by_draccus(name):
    config = ModelConfig.get_choice_class(name)()
    assert repr(encode_config(config, ModelConfig)) == repr(draccus.encode(config, ModelConfig))


def test_a_block_has_its_type_in_a_list_too():
    trackers = JsonlTrackerConfig(), WandbTrackerConfig(mode="offline")
    assert encode_config(trackers[0]) == {}, "where nothing else can be"
    assert encode_config(trackers[0], TrackerConfig) == {"type": "jsonl"}
    encoded = encode_config(TrainerConfig(tracker=trackers))["tracker"]
    assert [tracker["type"] for tracker in encoded] == ["jsonl", "wandb"]
    assert encoded[1]["mode"] == "offline"


def test_a_configuration_with_an_object_of_another_library_is_refused():
    assert encode_config({"a": (Path("b"), enum.Enum("Colour", "RED").RED, 1.5, None)}) == {
        "a": ["b", "RED", 1.5, None]
    }
    with pytest.raises(ConfigError, match="of SimpleNamespace, which no run can write down. Use numbers"):
        encode_config([SimpleNamespace()])
