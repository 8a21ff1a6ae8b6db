"""Values of a training command's configuration that cannot work together."""

from types import SimpleNamespace

import fsspec
import pytest

from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.models import LoraConfig, LoraModel
from lockstep.training import CheckpointerConfig, TrainConfig, TrainerConfig, TrainPreferenceConfig, TrainSimpoConfig
from lockstep.training.data import LmDataConfig, build
from lockstep.training.objectives import DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from lockstep.training.run.config import Setup
from tests import tiny
from tests.unit.training.objectives.test_preference import FILE


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hf_save_steps": 0, "hf_save_path": "a"}, "hf_save_steps is 0; it must be at least 1"),
        ({"hf_save_dtype": "int8", "hf_save_path": "a"}, "hf_save_dtype is 'int8'; it must be float32 or bfloat16"),
        ({"hf_save_steps": 5}, "hf_save_steps is set and hf_save_path is null"),
        ({"initialize_from_hf": "x"}, "exactly one of model and initialize_from_hf is needed, but both are given"),
        ({"model": None}, "exactly one of model and initialize_from_hf is needed, but neither is given"),
        ({"gradient_checkpointing": "full"}, "set model.gradient_checkpointing instead"),
        ({"lora": LoraConfig(r=4)}, "its random weights would stay as they are"),
    ],
)
def test_values_that_cannot_work(values, text):
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**{"data": LmDataConfig(), "model": tiny.CONFIG, "tokenizer": tiny.TOKENIZER, **values})


def config_with(base_path, cache_dir=None, urls=()):
    checkpointer = None if base_path is None else CheckpointerConfig(base_path=base_path)
    return TrainConfig(
        data=LmDataConfig(train_urls=urls, cache_dir=cache_dir),
        trainer=TrainerConfig(checkpointer=checkpointer),
        model=tiny.CONFIG,
        tokenizer=tiny.TOKENIZER,
    )


@pytest.mark.parametrize(
    ("base_path", "cache_dir", "expected"),
    [
        ("gs://bucket/checkpoints/", None, "gs://bucket/checkpoints/token-cache"),
        ("gs://bucket/checkpoints", "/disk", "/disk"),
        ("checkpoints", None, None),
        (None, None, None),
    ],
)
def test_tokens_are_beside_checkpoints_in_a_bucket(base_path, cache_dir, expected):
    assert config_with(base_path, cache_dir).source.cache_dir == expected


def test_a_start_on_an_empty_disk_finds_the_tokens_in_the_bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "disk"))
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n' * 9)
    config = config_with("memory://bucket/checkpoints", urls=(str(tmp_path / "a.jsonl"),))
    first = config.source.load(tiny.tokenizer(), 8, 0)
    assert fsspec.filesystem("memory").ls("/bucket/checkpoints/token-cache", detail=False)
    monkeypatch.setattr(build, "BuildWorker", None)  # nothing is tokenised again
    assert config.source.load(tiny.tokenizer(), 8, 0).digest() == first.digest()
    assert not (tmp_path / "disk").exists()


def setup(model, resumed_from=None):
    trainer = SimpleNamespace(resumed_from=resumed_from, frozen_copy=lambda model: ("copy of", model))
    return Setup(
        data=[],
        tokenizer=None,
        model=model,
        initial_model=lambda: "the first model",
        trainer=trainer,
        run_dir=None,
    )


@pytest.mark.parametrize(("resumed_from", "frozen"), [(None, "model"), ("step-4", "the first model")])
def test_the_reference_is_the_model_before_the_first_step(resumed_from, frozen):
    assert setup("model", resumed_from).reference(None) == ("copy of", frozen)


def test_the_reference_of_adapters_is_their_base_and_no_copy():
    base = object()
    assert setup(LoraModel(base=base, adapters=None, scale=1.0), "step-4").reference(None) is base


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], DpoConfig(beta=0.5)),
        (["--objective", "{type: dpo, label_smoothing: 0.1}"], DpoConfig(label_smoothing=0.1)),
        (["--objective", "{type: orpo, beta: 0.2}"], OrpoConfig(beta=0.2)),
        (["--objective", "{type: simpo}"], SimpoConfig()),
    ],
)
def test_the_command_takes_each(arguments, expected):
    config = parse_arguments(TrainPreferenceConfig, [*FILE, *arguments])
    assert config.loss_fn == expected and config.has_reference == isinstance(expected, DpoConfig)
    columns = {name: (one.shape, one.dtype.name) for name, one in config.columns(48).items()}
    pair = {"tokens": ((2, 32), "int32"), "loss_mask": ((2, 32), "bool")}
    assert columns == pair | ({"reference_logprobs": ((2,), "float32")} if config.has_reference else {})


UNPAIRED = ["--data.format", "unpaired_preference", "--objective"]


def test_the_command_takes_kto_with_answers_that_have_a_label():
    config = parse_arguments(TrainPreferenceConfig, [*FILE, *UNPAIRED, "{type: kto, desirable_weight: 1.3}"])
    assert config.loss_fn == KtoConfig(desirable_weight=1.3) and config.has_reference
    assert (config.row_name, config.sequences_per_row) == ("answers", 1)
    columns = {name: (one.shape, one.dtype.name) for name, one in config.columns(48).items()}
    assert columns == {
        "tokens": ((32,), "int32"),
        "loss_mask": ((32,), "bool"),
        "desirable": ((), "bool"),
        "reference_logprobs": ((2,), "float32"),
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--objective", "{type: kto}"], "whose examples are pairs, and KtoConfig learns from single answers"),
        (
            [*UNPAIRED, "{type: dpo}"],
            "are single answers with a label, and DpoConfig learns from pairs. Use format: pre",
        ),
        ([*UNPAIRED, "{type: kto}", "--trainer.train_batch_size", "1"], "train_batch_size is 1, and KtoConfig pairs"),
    ],
)
def test_objective_and_data_go_together(arguments, text):
    with pytest.raises(ConfigError, match=text):
        parse_arguments(TrainPreferenceConfig, [*FILE, *arguments])


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        ("{type: dop}", "'objective.type' is 'dop'. Did you mean 'dpo'?"),
        ("{type: dpo, betta: 1}", "unknown key 'objective.betta'. Did you mean 'beta'?"),
        ("{type: 'no_module_of_this_name:Mine'}", "module 'no_module_of_this_name' could not be imported"),
        ("{type: 'math:sqrt'}", "type 'math:sqrt' is not a subclass of PreferenceObjective"),
    ],
)
def test_one_that_is_not_there_is_an_error_with_a_name(objective, text):
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        parse_arguments(TrainPreferenceConfig, [*FILE, "--objective", objective])


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (TrainSimpoConfig, ["--config_path", "config/simpo_tiny.yaml"]),
        (TrainPreferenceConfig, [*FILE, "--objective", "{type: simpo}"]),
    ],
)
def test_a_reference_that_has_no_use_is_refused(cls, given):
    with pytest.raises(ConfigError, match="has no use for a reference model"):
        parse_arguments(cls, [*given, "--data.format", "preference_with_reference"])
