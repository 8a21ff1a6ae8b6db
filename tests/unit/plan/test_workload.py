"""Keys of a workload, and what the shipped configurations ask of the devices."""

from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.batch_inference import SampleConfig
from lockstep.engine import Engine, EngineConfig
from lockstep.errors import ConfigError
from lockstep.main import prepare as command
from lockstep.main.arguments import parse_arguments
from lockstep.main.commands import find_command
from lockstep.models import find_preset, padded_vocab_size
from lockstep.placement import make_mesh
from lockstep.plan.workload import (
    Infeasibility,
    SamplingWorkload,
    TrainingWorkload,
    key_in,
    largest_in,
    place_of,
    with_common_largest,
)
from lockstep.training import OptimizerConfig, TrainerConfig, lm_loss, parse_precision
from lockstep.training.step.train_step import init_model, init_state, state_structs
from tests import tiny
from tests.unit.engine.models import LLAMA, VOCAB, mesh_of, model_on, request

YAML = """\
# A comment.
trainer:
  seed: 0
  per_device_parallelism: 4
inference_eval:
  prompts:
    - one
  max_new_tokens: 64
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(YAML)
    return file


def test_a_key_that_is_there(path):
    assert place_of(path, "trainer.per_device_parallelism") == f"{path}:4"
    assert place_of(path, "inference_eval.max_new_tokens") == f"{path}:8"


def test_a_key_that_is_not_there_yet(path):
    assert place_of(path, "trainer.mp") == f"{path}:2 (add mp to trainer)"
    assert place_of(path, "engine.max_seqs") == f"{path}:1 (add engine.max_seqs)"


def test_a_key_of_the_command_line(path):
    assert place_of(path, "trainer.seed", ["trainer.seed"]) == "--trainer.seed on the command line"
    assert place_of(None, "trainer.seed") == "--trainer.seed"


def test_the_first_key_that_an_error_names():
    keys = {"max_seq_len": "engine.max_seq_len", "layout": "engine.layout"}
    assert key_in("layout {tensor: 3} and max_seq_len", keys) == "engine.layout"
    assert key_in("nothing", keys) is None


def test_what_is_refused_before_compiling_names_the_bound():
    engine = Engine(EngineConfig(max_seq_len=65), mesh_of("1,2,2"))
    with pytest.raises(ConfigError) as refused:
        engine.check(model_on("1,2,2"), [request(0, 5)])
    text = str(refused.value)
    assert largest_in(text) == 64 and key_in(text, {"max_seq_len": "engine.max_seq_len"}) == "engine.max_seq_len"
    assert largest_in("layout {tensor: 3} does not fit. Set tensor to one of [1, 2].") is None


def test_what_is_refused_twice_has_one_value_that_works():
    def infeasibility(key, largest):
        return Infeasibility(key=key, value=9000, largest=largest, text=f"at most {largest}")

    found = with_common_largest(
        [infeasibility("data.max_seq_len", 8192), infeasibility("mp", None), infeasibility("data.max_seq_len", 2048)]
    )
    assert [(one.key, one.largest, one.text) for one in found] == [
        ("data.max_seq_len", 2048, "at most 8192"),
        ("mp", None, "at most None"),
        ("data.max_seq_len", 2048, "at most 2048"),
    ]
    hopeless = with_common_largest([infeasibility("data.max_seq_len", 8192), infeasibility("data.max_seq_len", None)])
    assert [one.largest for one in hopeless] == [None, None]


@pytest.mark.parametrize(
    ("block", "engine_block", "name", "key"),
    [
        ("inference_eval", "inference_eval", "layout", "inference_eval.layout"),
        ("inference_eval", "inference_eval", "max_new_tokens", "inference_eval.max_new_tokens"),
        ("", "engine", "layout", "engine.layout"),
        ("", "engine", "max_new_tokens", "max_new_tokens"),
    ],
)
def test_a_key_is_in_the_block_that_has_it(block, engine_block, name, key):
    workload = SamplingWorkload(name=block, engine=EngineConfig(), engine_block=engine_block, requests=[])
    assert workload.key(name) == key


@pytest.mark.parametrize("shape", [(48,), (2, 48)])
def test_the_length_of_a_sequence_is_the_last_axis_of_its_tokens(shape):
    workload = TrainingWorkload(
        trainer=TrainerConfig(),
        optimizer=OptimizerConfig(),
        loss=lm_loss,
        columns={"tokens": jax.ShapeDtypeStruct(shape, np.int32)},
    )
    assert workload.length == 48


ROOT = Path(__file__).parents[3]
POD = {
    "simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml": ("train-simpo", 8),
    "grpo_gsm8k_qwen25_3b_v6e_8.yaml": ("train-grpo", 1),
    "grpo_gsm8k_qwen25_3b_v6e_16.yaml": ("train-grpo", 4),
    "grpo_gsm8k_qwen3_30b_a3b_v5p_64.yaml": ("train-grpo", 8),
    "sampler/sample_qwen3_30b_a3b_v6e_16.yaml": ("sample", 4),
    "sampler/sample_llama8b_multihost.yaml": ("sample", 2),
    "sampler/sample_llama8b_multihost_real.yaml": ("sample", 2),
    "sampler/sample_llama8b_multihost_128prompts_2048_hostdp_wandb_v5p16.yaml": ("sample", 2),
    "sampler/sample_llama8b_multihost_128prompts_2048_hostdp_wandb_v5p32.yaml": ("sample", 4),
}


def read(name, *more):
    found, config = command.read_plan(None, ["--config_path", str(ROOT / "config" / name), *more])
    return found.workload(config)


@pytest.mark.parametrize("name", POD)
def test_every_pod_configuration_is_understood_without_a_network(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    workload = read(name)
    assert (workload.command, workload.hosts) == POD[name]
    parameters = 3.09e9 if "qwen25" in name else 30.5e9 if "qwen3" in name else 8.03e9
    config = workload.model
    inner = config.intermediate_dim if config.experts is None else config.experts.num_experts * config.expert_dim
    heads = (config.num_heads * 2 + config.num_kv_heads * 2) * config.head_size
    layer = config.hidden_dim * (heads + 3 * inner)
    outer = workload.vocab_size * config.hidden_dim * (1 if config.tie_word_embeddings else 2)
    assert config.num_layers * layer + outer == pytest.approx(parameters, rel=0.005), "as published"


@pytest.mark.parametrize(
    ("name", "key"),
    [("simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "inference_eval.metrics"),
     ("sampler/sample_llama8b_multihost.yaml", "metrics")],
)  # fmt: skip
def test_a_module_of_the_users_is_not_imported(name, key, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "users_metrics.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert read(name, f"--{key}", "[exact_match, users_metrics:score]").sampling
    with pytest.raises(ConfigError, match=r"metric 'score' is not known"):
        read(name, f"--{key}", "[score]")


def test_a_training_checkpoint_is_planned_from_what_it_says_of_its_model(tmp_path):
    tiny.save_checkpoint(str(tmp_path / "run" / "checkpoints"))
    config = SampleConfig(prompts=["one", "two words"], checkpoint_path=str(tmp_path / "run"), max_new_tokens=5)
    workload = find_command("sample").workload(config)
    assert (workload.model, workload.vocab_size) == (tiny.CONFIG, padded_vocab_size(tiny.vocab_size(), 1))
    assert (workload.dtype, workload.model_key) == ("float32", "checkpoint_path")
    lengths = [len(request.prompt_tokens) for request in workload.sampling[0].requests]
    assert lengths == [len(tiny.tokenizer()(text)["input_ids"]) for text in ("one", "two words")], (
        "by its own tokenizer"
    )


def test_a_model_in_place_of_a_run_is_planned_without_the_runs_tokenizer(tmp_path):
    config = SampleConfig(prompts=["one", "two words"], checkpoint_path=str(tmp_path), max_new_tokens=5)
    workload = find_command("sample").workload(config, "Qwen2.5-0.5B-Instruct")
    assert workload.model.num_layers == 24 and any("UTF-8 bytes" in note for note in workload.notes)


def test_simpo_on_a_pod(monkeypatch):
    monkeypatch.chdir(ROOT)
    workload = read("simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml")
    assert workload.training.length == 2048 and workload.training.columns["tokens"].shape == (2, 2048)
    (samples,) = workload.sampling
    assert len(samples.requests) == 5 and samples.requests[0].params.max_new_tokens == 64
    assert samples.key("layout") == "inference_eval.layout"
    assert any("UTF-8 bytes" in note for note in workload.notes)
    buckets = "--data.length_buckets", "[512, 1024]"
    bucketed = read("simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", *buckets)
    assert bucketed.training.columns == workload.training.columns, "the longest rows decide"
    assert any("length_buckets: the train step is that of the longest rows" in note for note in bucketed.notes)
    exported = read("simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "--hf_save_path", "model")
    alone = read("simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "--hf_save_path", "null")
    assert {each.partition(":")[0] for each in exported.notes} - {each.partition(":")[0] for each in alone.notes} == {
        "hf_save_path"
    }


def test_grpo_asks_for_rollouts_and_for_samples(monkeypatch):
    monkeypatch.chdir(ROOT)
    workload = read("grpo_gsm8k_qwen25_3b_v6e_16.yaml")
    rollout, samples = workload.sampling
    assert (rollout.name, samples.name) == ("rollout", "inference_eval")
    sequences = sum(request.params.n_generations for request in rollout.requests)
    assert sequences == workload.training.trainer.train_batch_size == 128
    request = rollout.requests[0]
    assert len(request.prompt_tokens) + request.params.max_new_tokens == workload.training.length == 1024
    assert not workload.training.reference
    columns = workload.training.columns
    assert columns["segment_ids"].shape == (1024,) and columns["advantage"].shape == (16,), "the packed rows of a run"
    open_rows = read("grpo_gsm8k_qwen25_3b_v6e_16.yaml", "--trainer.per_device_parallelism", "-1").training
    mesh = make_mesh("1,2,1", jax.devices()[:2])
    assert open_rows.microbatches(mesh) == 8 and workload.training.microbatches(mesh) == 16
    with_reference = read("grpo_gsm8k_qwen25_3b_v6e_16.yaml", "--kl_coefficient", "0.04")
    assert with_reference.training.reference and "reference_logprobs" in with_reference.training.columns
    renewed = read("grpo_gsm8k_qwen25_3b_v6e_16.yaml", "--kl_coefficient", "0.04", "--reference_every", "8").training
    assert renewed.renewal.every == 8 and not renewed.reference, "the optimizer's state has it"
    taught = read("grpo_gsm8k_qwen25_3b_v6e_16.yaml", "--teacher", "Qwen2.5-7B", "--teacher_coefficient", "1").training
    assert [each.config.num_layers for each in taught.frozen] == [28] and "teacher_logprobs" in taught.columns
    assert (rollout.steps, samples.steps) == (1, None), "training waits for the rollout of each step"


def test_a_rollout_for_several_updates_has_their_answers_once(monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = ("--minibatches", "2", "--num_iterations", "3", "--use_rollout_logprobs", "false")
    workload = read("grpo_gsm8k_qwen25_3b_v6e_16.yaml", *arguments)
    rollout = workload.sampling[0]
    assert sum(request.params.n_generations for request in rollout.requests) == 256 and rollout.steps == 6
    assert "old_logprobs" in workload.training.columns


@pytest.mark.parametrize(("most", "turns"), [(3, 3), (9, 3.84)])
def test_conversations_are_planned_turn_by_turn(most, turns, monkeypatch):
    """A row of 1,024 tokens has room for 768 after a question of 256: for 3.84 answers of 200."""
    monkeypatch.chdir(ROOT)
    talks = "--environment", f'{{"type": "retry", "max_turns": {most}}}', "--rollout.max_new_tokens", "200"
    workload = read("grpo_gsm8k_qwen25_3b_v6e_16.yaml", *talks)
    rollout, samples = workload.sampling
    assert (rollout.turns, samples.turns, rollout.steps, len(rollout.requests)) == (turns, 1, 1, 128)
    assert {
        (len(turn.prompt_tokens), turn.params.max_new_tokens, turn.params.n_generations) for turn in rollout.requests
    } == {(824, 200, 1)}
    (note,) = [note for note in workload.notes if note.startswith("environment: ")]
    assert f"128 conversations of {turns:g} answers of 200 tokens (environment.max_turns is {most}" in note


def test_rows_longer_than_the_model_are_refused_and_the_longest_that_work_are_planned(monkeypatch):
    monkeypatch.chdir(ROOT)
    workload = read("simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "--data.max_seq_len", "9000")
    (infeasibility,) = workload.infeasibilities
    assert (infeasibility.key, infeasibility.value, infeasibility.largest) == ("data.max_seq_len", 9000, 8192)
    assert "data.max_seq_len is 9000" in infeasibility.text and "Set it to at most 8192" in infeasibility.text
    assert workload.training.columns["tokens"].shape == (2, 8192)
    most = read("simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "--data.max_seq_len", "8192")
    assert most.infeasibilities == () and most.training.length == 8192


def test_a_host_answers_its_share(monkeypatch):
    monkeypatch.chdir(ROOT)
    workload = read("sampler/sample_llama8b_multihost_128prompts_2048_hostdp_wandb_v5p32.yaml")
    assert workload.one_host and len(workload.sampling[0].requests) == 32
    assert workload.sampling[0].key("max_seq_len") == "engine.max_seq_len"
    assert workload.sampling[0].key("max_new_tokens") == "max_new_tokens"


def test_the_command_is_found_by_its_keys_or_asked_for():
    with pytest.raises(ConfigError, match="could be of train-lm or train-simpo.* --command train-lm"):
        command.read_plan(None, ["--tokenizer", "x", "--model.type", "llama", "--data.max_seq_len", "8"])
    with pytest.raises(
        ConfigError, match=r"as a configuration of train-simpo: .*gama.*Did you mean 'gamma_beta_ratio'"
    ):
        command.read_plan(None, ["--tokenizer", "x", "--model.type", "llama", "--beta", "2", "--gama_beta_ratio", "1"])
    found, _ = command.read_plan("train-lm", ["--tokenizer", "x", "--model.type", "llama", "--data.max_seq_len", "8"])
    assert found.name == "train-lm"


def test_a_model_that_is_not_known():
    sample = find_command("sample")
    config = parse_arguments(sample.config(), ["--hf_checkpoint", "somewhere/my-own-7b", "--prompts", "[hello]"])
    with pytest.raises(ConfigError, match=r"neither a directory .* --model Llama-3.1-8B"):
        sample.workload(config)
    assert sample.workload(config, "Llama-3.2-1B").model.num_layers == 16


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", 32),
        ("gs://b/models/Llama-3.1-8B-Instruct/", 32),
        ("Qwen/Qwen2.5-3B-Instruct", 36),
        ("google/gemma-2-9b-it", 42),
        ("google/gemma-3-27b-it", 62),
        ("allenai/OLMo-2-1124-7B-Instruct", 32),
        ("allenai/Olmo-3-7B-Instruct", 32),
        ("allenai/Olmo-3.1-32B-Think", 64),
        ("microsoft/phi-4", 40),
        ("CohereLabs/c4ai-command-a-03-2025", 64),
        ("zai-org/GLM-4.5-Air", 46),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 48),
        ("deepseek-ai/DeepSeek-V3", 61),
        ("deepseek-ai/DeepSeek-R1", 61),
    ],
)
def test_a_well_known_checkpoint_is_planned_by_its_name(name, layers):
    sample = find_command("sample")
    config = parse_arguments(sample.config(), ["--hf_checkpoint", name, "--prompts", "[hello]"])
    assert sample.workload(config).model.num_layers == layers
    assert find_preset(name + "-of-mine") is None


def test_shapes_of_the_state_are_those_of_the_real_one():
    import haliax as hax

    from lockstep.models import LlamaLMHeadModel

    mesh, precision = make_mesh("1,2,2", jax.devices()[:4]), parse_precision("p=f32,c=bf16")
    optimizer = OptimizerConfig().build(10)

    def init(key):
        return LlamaLMHeadModel.init(hax.Axis("vocab", VOCAB), LLAMA, key=key)

    planned, _ = state_structs(init, optimizer, mesh, precision)

    def launch(name, function, arguments, *, out_shardings, donate=()):
        with jax.set_mesh(mesh):
            return jax.jit(function, out_shardings=out_shardings, donate_argnums=donate)(*arguments)

    real, _ = init_state(init_model(init, 0, mesh, precision, launch), optimizer, mesh, precision, launch)
    assert jax.tree.structure(planned) == jax.tree.structure(real)
    for plan, array in zip(jax.tree.leaves(planned), jax.tree.leaves(real), strict=True):
        assert (plan.shape, plan.dtype, plan.sharding) == (array.shape, array.dtype, array.sharding)


@pytest.mark.parametrize("name", ["demo.yaml", "simpo_tiny.yaml"])
def test_columns_are_those_of_the_data(name, monkeypatch):
    from lockstep.text import load_tokenizer

    monkeypatch.chdir(ROOT)
    which = "train-lm" if name == "demo.yaml" else "train-simpo"
    config = parse_arguments(find_command(which).config(), ["--config_path", f"config/{name}"])
    rows = config.data.load(load_tokenizer(config.tokenizer), config.model.max_seq_len, 0)
    batch = rows.batch(0, 4, slice(0, 4))
    planned = config.data.columns(config.model.max_seq_len)
    assert {name: (a.shape[1:], a.dtype) for name, a in batch.items()} == {
        name: (one.shape, np.dtype(one.dtype)) for name, one in planned.items()
    }


def test_grpo_batches_are_whole_groups():
    with pytest.raises(ConfigError, match=r"whole groups\. Use a multiple of 8, e\.g\. 24"):
        read("grpo_gsm8k_qwen25_3b_v6e_8.yaml", "--trainer.train_batch_size", "30")
    with pytest.raises(ConfigError, match="rollout.max_new_tokens is 1024 and data.max_seq_len is 1024"):
        read("grpo_gsm8k_qwen25_3b_v6e_8.yaml", "--rollout.max_new_tokens", "1024")


@pytest.mark.parametrize(("dtype", "stored"), [(None, "bfloat16"), ("float32", "float32")])
def test_adapters_are_planned_with_their_base_as_the_reference(dtype, stored, monkeypatch):
    monkeypatch.chdir(ROOT)
    more = ["--lora.r", "16", "--kl_coefficient", "0.05", *([] if dtype is None else ["--lora.base_dtype", dtype])]
    workload = read("grpo_gsm8k_qwen25_3b_v6e_8.yaml", *more)
    assert workload.dtype == workload.training.lora.base_dtype == stored and not workload.training.reference
    whole = read("grpo_gsm8k_qwen25_3b_v6e_8.yaml", "--kl_coefficient", "0.05")
    assert whole.training.lora is None and whole.training.reference and whole.dtype == "float32"
