"""A run from its configuration: what is refused before a file of data is read or a weight is made."""

import dataclasses
import json
import logging
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.batch_inference.checkpoint import checkpoint_at, load
from lockstep.errors import ConfigError, DisagreementError, PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.arguments import parse_arguments
from lockstep.models import LoraModel, fingerprint, load_config, load_hf, read_hf_config, save_hf
from lockstep.placement import make_mesh
from lockstep.report import append_jsonl, read_jsonl
from lockstep.testing import run_threads
from lockstep.text import load_tokenizer
from lockstep.training import (
    ExportConfig,
    StepInfo,
    TrainerConfig,
    TrainLmConfig,
    TrainPreferenceConfig,
    export,
    saved_model,
    train,
)
from lockstep.training.checkpoints.saved_model import _is_beside
from lockstep.training.run import hf_saves
from lockstep.training.run.hf_saves import HfSaves
from lockstep.training.run.initial_model import describe_adapters, load_frozen
from lockstep.training.run.run import _restore
from tests import tiny
from tests.adapters import LORA, numpy_merged, save_base, save_checkpoint
from tests.counted_files import CountedFiles


@pytest.mark.parametrize("key", ["steps_per_eval", "per_device_eval_parallelism"])
def test_a_validation_without_files_is_refused(key, tmp_path):
    given = ["--tokenizer", tiny.TOKENIZER, "--model.type", "llama", "--data.train_urls", "[a.jsonl]"]
    given += [f"--trainer.{key}", "3", "--trainer.log_dir", str(tmp_path)]
    config = parse_arguments(TrainLmConfig, given)
    with pytest.raises(PeerError, match=rf"trainer\.{key} is 3, but data\.validation_urls is empty"):
        train(config, Hosts(MemoryClient.hub(1)[0]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["metrics", "alarms.on_alarm"])
def test_a_function_that_one_host_lacks_is_found_by_all_before_anything_is_read(key, tmp_path):
    value = "[no_such_module:act]" if key == "metrics" else "no_such_module:act"
    given = ["--tokenizer", tiny.TOKENIZER, "--model.type", "llama", "--data.train_urls", "[a.jsonl]"]
    given += ["--inference_eval.prompts", "[Why]", f"--inference_eval.{key}", value, "--trainer.log_dir", str(tmp_path)]
    config = parse_arguments(TrainLmConfig, given)
    with pytest.raises(PeerError, match="module 'no_such_module' could not be imported"):
        train(config, Hosts(MemoryClient.hub(1)[0]))
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_one_host_has_otherwise_is_refused_by_all_before_anything_is_read(tmp_path):
    words = ["--tokenizer", "no/such/tokenizer", "--model.type", "llama", "--data.train_urls", "[a.jsonl]"]
    words += ["--trainer.log_dir", str(tmp_path), "--trainer.seed"]
    configs = [parse_arguments(TrainLmConfig, [*words, str(seed)]) for seed in (0, 0, 1)]

    def refused(hosts):
        with pytest.raises(DisagreementError, match="'config'"):
            train(configs[hosts.index], hosts)

    run_threads(refused, 3)
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_is_found_before_anything_is_read(tmp_path, monkeypatch):
    words = ["--tokenizer", "no/such/tokenizer", "--model.type", "llama", "--data.train_urls", "[a.jsonl]"]
    config = parse_arguments(TrainLmConfig, [*words, "--trainer.tracker.type", "wandb"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PeerError, match=r"wandb") as caught:
        train(config, Hosts(MemoryClient.hub(1)[0]))
    assert "no/such/tokenizer" not in str(caught.value)


def test_the_leader_alone_reads_a_tokenizer_at_a_url(tmp_path):
    given = ["--tokenizer", f"counted://{Path(tiny.TOKENIZER).absolute()}", "--data.train_urls", "[a.jsonl]"]
    given += ["--initialize_from_hf", str(tmp_path), "--trainer.log_dir", str(tmp_path)]
    golden = Path(__file__).parents[3] / "golden" / "llama3" / "config.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(golden.read_text()) | {"vocab_size": 3}))
    config = parse_arguments(TrainLmConfig, given)

    def refused(hosts):
        with pytest.raises(PeerError, match=r"the model's vocabulary has 3 entries") as caught:
            train(config, hosts)
        return str(caught.value)

    load_tokenizer(tiny.TOKENIZER)  # transformers is not imported by several threads at once
    CountedFiles.bytes_read()
    first, *others = run_threads(refused, 3)
    assert others == [first] * 2 and first.startswith("3 of 3 processes failed"), "each had the tokenizer"
    files = [Path(path).name for path, _ in CountedFiles.reads]
    assert "tokenizer.json" in files and len(files) == len(set(files)), "each file was read once"


@pytest.mark.slow
def test_pairs_with_log_probabilities_of_a_reference_of_their_own_are_learned_from(tmp_path):
    def chat(answer):
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]

    reference = {"ref_chosen_logps": -3.0, "ref_rejected_logps": -5.0}
    pairs = [{"chosen": chat("yes"), "rejected": chat(str(n)), **reference} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    given = f"--config_path config/dpo_tiny.yaml --data.train_urls [{tmp_path}/pairs.jsonl] --data.length_buckets [30] "
    given += f"--data.format preference_with_reference --data.cache_dir {tmp_path}/cache --trainer.log_dir {tmp_path} "
    given += "--trainer.train_batch_size 8 --trainer.per_device_parallelism -1 --trainer.num_train_steps 2 "
    given += "--optimizer.warmup 0 --trainer.run_id run --inference_eval.enabled false --model.num_layers 1"
    assert train(parse_arguments(TrainPreferenceConfig, given.split()), HOSTS) == 0
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "train/loss" in line]
    assert len(steps) == 2
    for name, expected in (("chosen", -3.0), ("rejected", -5.0)):
        rewards = [0.5 * (line[f"train/logps/{name}"] - expected) for line in steps]
        assert [line[f"train/rewards/{name}"] for line in steps] == pytest.approx(rewards, rel=1e-4)


@pytest.mark.parametrize(
    ("last_round", "hooks_called", "kept"), [(4, False, [2, 4]), (2, False, [2]), (None, False, [2]), (2, True, [2, 4])]
)
def test_rounds_that_the_callback_does_not_make_again_at_a_resume_stay(tmp_path, last_round, hooks_called, kept):
    """After the round of step 4 another hook was interrupted; or the round was, or no hook was called; all were."""
    metadata = {"step": 4, "hooks_called": hooks_called, "hooks": {"inference_eval": {"last_step": last_round}}}
    trainer = SimpleNamespace(
        restore=lambda init, frozen: "state",
        resumed_from=SimpleNamespace(**metadata),
        config=TrainerConfig(),
        tracker=SimpleNamespace(rewind=lambda **arguments: rewound.append(arguments)),
    )
    rewound = []
    for name in ("samples.jsonl", "tasks.jsonl"):
        append_jsonl(tmp_path / name, [{"step": step} for step in (2, 4, 6)])
    assert _restore(None, None, trainer, tmp_path, HOSTS) == "state"
    for name in ("samples.jsonl", "tasks.jsonl"):
        assert [row["step"] for row in read_jsonl(tmp_path / name)] == kept
    rounds = ("inference_eval/", "eval/")
    assert rewound == [{"step": 4, "rounds_step": 4 if 4 in kept else 3, "rounds": rounds}]


@pytest.fixture(scope="module")
def model():
    return tiny.init_model(tiny.make_trainer("auto", 1))


HOSTS = Hosts(MemoryClient.hub(1)[0])
"""One for all tests here, so that programs are compiled once."""


def make(tmp_path, **values):
    fields = {"hf_save_path": "hf", "hf_save_dtype": None, "lora": None, "trainer": TrainerConfig(num_train_steps=9)}
    return HfSaves(SimpleNamespace(**fields | values), tmp_path, tiny.tokenizer(), tiny.vocab_size() - 2, HOSTS), HOSTS


def info(model, step):
    return StepInfo(step=step - 1, model=model, loss=1.0, step_duration=1.0)


def names(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


def test_models_are_saved_by_their_steps_and_the_last_one_under_the_name_alone(tmp_path, model):
    saves, _ = make(tmp_path, hf_save_dtype="bfloat16")
    for step in (0, 3, 9):
        saves.on_step(info(model, step))
    saves.on_step(info(model, 9), force=True)
    assert names(tmp_path) == ["hf-step-3"], "not before the first step, and the last model is saved at the end"
    assert saves.save_last(model, None) == str(tmp_path / "hf")
    assert saves.save_last(model, 5) == str(tmp_path / "hf-step-5")
    hf = read_hf_config(str(tmp_path / "hf-step-3"))
    assert (hf["vocab_size"], hf["torch_dtype"]) == (tiny.vocab_size() - 2, "bfloat16")
    found = load_hf(str(tmp_path / "hf"), make_mesh("auto"), dtype="bfloat16")
    np.testing.assert_array_equal(found.embed.array, np.asarray(model.embed.array).astype("bfloat16")[:-2])
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(model))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("{tmp_path}/base", "initialize_from_hf"),
        ("{tmp_path}/base/", "initialize_from_hf"),
        ("{tmp_path}/link", "initialize_from_hf"),
        ("../run/../base", "initialize_from_hf"),
        ("{tmp_path}/tokenizer", "tokenizer"),
        ("checkpoints", "that of the checkpoints"),
        (".", "the run directory"),
        ("{tmp_path}/trained", "initialize_from_hf"),
    ],
)
def test_no_place_that_the_run_reads_or_writes_is_saved_to(tmp_path, given, key):
    """The last is that of a model of a step."""
    base = tmp_path / ("trained-step-4" if given.endswith("trained") else "base")
    base.mkdir()
    (base / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(base)
    values = {"initialize_from_hf": str(base), "tokenizer": str(tmp_path / "tokenizer")}
    values |= {"hf_save_path": given.format(tmp_path=tmp_path), "hf_save_steps": 4}
    saves, _ = make(tmp_path / "run", **values)
    with pytest.raises(ConfigError, match=f"hf_save_path is .*, and so is {key}, which saving would replace"):
        saves.check(str(tmp_path / "run" / "checkpoints"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([base.name, "link"])


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    given = ["--tokenizer", tiny.TOKENIZER, "--trainer.log_dir", str(tmp_path / "runs"), "--hf_save_path"]
    given += [str(tmp_path / "file" / "model"), "--trainer.num_train_steps", "1000000", "--model.type", "llama"]
    given += ["--data.train_urls", "[data/demo/train.jsonl]", "--data.format", "prompt_completion"]
    given += ["--model.hidden_dim", "8", "--model.num_layers", "1", "--model.num_heads", "2"]
    given += ["--model.num_kv_heads", "2", "--model.intermediate_dim", "8", "--model.max_seq_len", "32"]
    with pytest.raises(PeerError, match=r"Not a directory: '.*/file"):
        train(parse_arguments(TrainLmConfig, given), Hosts(MemoryClient.hub(1)[0]))


@pytest.mark.parametrize("lora", [None, LORA])
def test_every_model_is_the_average_where_there_is_one_in_the_type_of_the_parameters(tmp_path, monkeypatch, lora):
    saved = []
    monkeypatch.setattr(
        hf_saves, "save_hf", lambda model, path, *, dtype, **options: saved.append((model, dtype)) or True
    )
    saves, _ = make(tmp_path, trainer=TrainerConfig(num_train_steps=9, mp="p=bf16"), lora=lora)
    saves.on_step(dataclasses.replace(info("parameters", 3), average="average"))
    saves.on_step(info("parameters", 6))
    saves.save_last("average", None)
    dtype = "bfloat16" if lora is None else None  # that of their base
    assert saved == [("average", dtype), ("parameters", dtype), ("average", dtype)]


def test_a_save_that_fails_costs_a_model_and_nothing_else(tmp_path, model, caplog):
    (tmp_path / "hf-step-3").write_text("in the way")
    saves, _ = make(tmp_path)
    saves.on_step(info(model, 3))
    assert (saves.errors, saves.interrupted, names(tmp_path)) == (1, False, ["hf-step-3"])
    assert "the model of step 3 was not saved, training goes on" in caplog.text


def test_a_job_that_is_asked_to_end_gives_up_the_save_for_the_checkpoint(tmp_path, model, caplog):
    saves, hosts = make(tmp_path)
    hosts.preemption.note(signal.SIGTERM)
    with caplog.at_level(logging.INFO):
        saves.on_step(info(model, 3))
    assert saves.interrupted and names(tmp_path) == [] and "model saved" not in caplog.text
    hosts.preemption.clear()
    saves.on_step(info(model, 3))
    assert not saves.interrupted and names(tmp_path) == ["hf-step-3"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base model, a checkpoint of adapters for it, and what they make together."""
    path = tmp_path_factory.mktemp("run")
    save_base(str(path / "base"))
    return path, save_checkpoint(str(path / "checkpoints"), str(path / "base"))


def config(base, *arguments, cls=TrainLmConfig):
    given = ["--tokenizer", tiny.TOKENIZER, "--initialize_from_hf", str(base), "--data.train_urls", "[a.jsonl]"]
    return parse_arguments(cls, [*given, *arguments])


def test_a_run_says_what_its_adapters_are_for(saved):
    path, _ = saved
    base, shape = path / "base", load_config(path / "base")
    found = describe_adapters(config(base, "--lora.r", "4", "--trainer.mp", "p=f32,c=bf16"), shape)
    assert (found.base, found.lora.base_dtype, found.lora.r) == (str(base), "bfloat16", 4)
    assert found.fingerprint == fingerprint(str(base))
    frozen = load_frozen(found, shape, make_mesh("1,2,2"), HOSTS)
    assert isinstance(frozen, LoraModel) and frozen.adapters is None and frozen.scale == 2.0
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen.base)} == {"bfloat16"}
    assert describe_adapters(config(base), shape) is None
    wide = config(base, "--lora.base_dtype", "float32", "--trainer.mp", "p=f32,c=bf16", "--lora.r", "4")
    assert describe_adapters(wide, shape).lora.base_dtype == "float32"
    with pytest.raises(ConfigError, match="lora.r is 33, and q_proj maps 32 numbers to 32"):
        describe_adapters(config(base, "--lora.r", "33"), shape)


def test_adapters_need_a_base():
    with pytest.raises(ConfigError, match="lora is given, but the model is from scratch: .* Set initialize_from_hf"):
        parse_arguments(
            TrainLmConfig,
            ["--tokenizer", tiny.TOKENIZER, "--model.type", "llama", "--data.train_urls", "[a]", "--lora.r", "4"],
        )


def test_modules_are_named_on_the_command_line(saved):
    names = config("base", "--lora.target_modules", "[q_proj, v_proj]").lora.target_modules
    assert names == ("q_proj", "v_proj")
    assert config("base", "--lora.target_modules", "o_proj").lora.target_modules == ("o_proj",)
    with pytest.raises(ConfigError, match="has 'query_proj'; it must be all-linear alone, or one or more of q_proj"):
        config("base", "--lora.target_modules", "query_proj")


def test_a_checkpoint_of_adapters_is_read_with_its_base(saved):
    path, model = saved
    found = saved_model(str(path / "checkpoints"))
    assert found.adapters.base == str(path / "base") and found.dtype == "float32"
    assert found.skeleton().embed.array.shape == model.base.embed.array.shape
    got, read_bytes, _ = load(HOSTS, found, make_mesh("1,2,2"), "bfloat16")
    assert jax.tree.structure(got) == jax.tree.structure(model) and read_bytes > 0
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_merged_model_is_exported_as_the_run_saves_it(saved, tmp_path, dtype):
    path, model = saved
    out = tmp_path / "out"
    export(ExportConfig(checkpoint=str(path / "checkpoints"), output=str(out), dtype=dtype), HOSTS)
    save_hf(model, tmp_path / "saved", dtype=dtype, vocab_size=tiny.vocab_size(), hosts=HOSTS)
    ours, saves = (load_file(each / "model.safetensors") for each in (out, tmp_path / "saved"))
    assert ours.keys() == saves.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == jnp.dtype(dtype or "float32")
        mine, theirs = (np.asarray(each, np.float32) for each in (tensor, saves[name]))
        np.testing.assert_allclose(mine, theirs, rtol=2**-7 if dtype else 1e-5, atol=1e-6, err_msg=name)
    expected = numpy_merged(model)["down_proj"][1].T
    given = np.asarray(ours["model.layers.1.mlp.down_proj.weight"], np.float32)
    np.testing.assert_allclose(given, expected, rtol=2**-7 if dtype else 1e-5, atol=1e-6)


def test_the_adapters_are_exported_as_peft_has_them(saved, tmp_path):
    path, model = saved
    export(ExportConfig(checkpoint=str(path / "checkpoints"), output=str(tmp_path / "out"), adapters=True), HOSTS)
    values = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (values["peft_type"], values["r"], values["lora_alpha"], values["bias"]) == ("LORA", 3, 6.0, "none")
    assert values["target_modules"] == list(LORA.modules_of(tiny.CONFIG)) and values["base_model_name_or_path"] == str(
        path / "base"
    )
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * tiny.CONFIG.num_layers
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_{}.weight"
    low, high = tensors[name.format("A")], tensors[name.format("B")]
    delta = numpy_merged(model)["o_proj"][1] - np.asarray(model.weight("o_proj").array[1], np.float64)
    np.testing.assert_allclose(2.0 * high @ low, delta.reshape(-1, tiny.CONFIG.hidden_dim).T, rtol=1e-4, atol=1e-5)


def test_adapters_that_are_not_there_cannot_be_exported(tmp_path):
    tiny.save_checkpoint(str(tmp_path / "checkpoints"))
    with pytest.raises(PeerError, match="adapters is true, and .*step-4 has none: its run trained the whole model"):
        export(ExportConfig(checkpoint=str(tmp_path / "checkpoints"), output="out", adapters=True), HOSTS)
    with pytest.raises(ConfigError, match="adapters is true, so dtype and tokenizer have no effect"):
        ExportConfig(checkpoint="a", output="b", adapters=True, dtype="float32")


def test_a_base_that_is_not_beside_the_checkpoint_is_read_only_where_it_is_given(saved, tmp_path):
    shutil.copytree(saved[0] / "checkpoints", tmp_path / "run" / "checkpoints")
    run, base = str(tmp_path / "run" / "checkpoints"), str(saved[0] / "base")
    with pytest.raises(ConfigError, match="base model is .*/base', which is not beside it.*add --base_model .*/base"):
        saved_model(run).checked_base()
    assert saved_model(run, base_model=base).checked_base() == base
    with pytest.raises(PeerError, match="which is not beside it"):
        export(ExportConfig(checkpoint=run, output=str(tmp_path / "out")), HOSTS)
    with pytest.raises(PeerError, match="which is not beside it"):
        export(ExportConfig(checkpoint=run, output=str(tmp_path / "out"), adapters=True), HOSTS)
    assert not (tmp_path / "out").exists()
    configuration = tmp_path / "run.yaml"
    configuration.write_text(f"initialize_from_hf: {base}\nlora: {{r: 3}}\n")
    words = ["--checkpoint", run, "--base_model", str(configuration), "--output"]
    export(parse_arguments(ExportConfig, [*words, str(tmp_path / "out")]), HOSTS)
    assert (tmp_path / "out" / "config.json").is_file()
    export(parse_arguments(ExportConfig, [*words, str(tmp_path / "peft"), "--adapters", "true"]), HOSTS)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    configuration.write_text("model: {type: llama}\n")
    with pytest.raises(ConfigError, match="base_model is the configuration '.*run.yaml', which names no initialize_"):
        parse_arguments(ExportConfig, [*words, "out"])
    with pytest.raises(ConfigError, match="base_model is '.*', and .*base has no adapters. Remove it"):
        checkpoint_at(base, base_model=base)
    assert checkpoint_at(run, base_model=base).checked_base() == base


@pytest.mark.parametrize(
    ("base", "checkpoints", "beside"),
    [
        ("/runs/a/base", "/runs/a/checkpoints", True),
        ("/runs/a/../b/base", "/runs/a/checkpoints", False),
        ("/runs/ab", "/runs/a", True),
        ("/runs/a-b/base", "/runs/a/checkpoints", False),
        ("gs://bucket/a/base", "gs://bucket/a/checkpoints", True),
        ("gs://other/a/base", "gs://bucket/a/checkpoints", False),
        ("gs://other/base", "gs://bucket", False),
        ("gs://bucket/a/../../other", "gs://bucket/a/checkpoints", False),
        ("http://bucket/a/base", "gs://bucket/a/checkpoints", False),
        ("/etc", "/checkpoints", False),
    ],
)
def test_beside_is_below_the_directory_of_the_checkpoints(base, checkpoints, beside):
    assert _is_beside(base, checkpoints) is beside


def test_a_base_that_is_gone_or_another_one_is_refused(saved, tmp_path):
    shutil.copytree(saved[0] / "base", tmp_path / "base")
    save_checkpoint(str(tmp_path / "checkpoints"), str(tmp_path / "base"))
    found = saved_model(str(tmp_path / "checkpoints"))
    assert found.checked_base() == str(tmp_path / "base")
    save_hf(
        jax.tree.map(lambda leaf: 2 * leaf, saved[1].base), tmp_path / "base", tokenizer=tiny.tokenizer(), hosts=HOSTS
    )
    with pytest.raises(ConfigError, match="has adapters for another base model than the one that is now at .*/base"):
        found.checked_base()
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(PeerError, match="has adapters alone, and their base model cannot be read: .* Put the checkp"):
        load(HOSTS, found, make_mesh("auto"), None)
    with pytest.raises(PeerError, match="has adapters alone, and their base model cannot be read"):
        export(ExportConfig(checkpoint=found.path, output=str(tmp_path / "out")), HOSTS)
