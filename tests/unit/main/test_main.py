"""Every configuration that is shipped can be read by its command."""

from pathlib import Path

import pytest

from lockstep.batch_inference import SampleConfig
from lockstep.main.arguments import parse_arguments
from lockstep.text import read_prompts
from lockstep.training import TrainGrpoConfig, TrainLmConfig, TrainPreferenceConfig, TrainSimpoConfig

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "config").rglob("*.yaml"))
COMMANDS = {
    "demo": TrainLmConfig,
    "train_lm": TrainLmConfig,
    "lm": TrainLmConfig,
    "dpo": TrainPreferenceConfig,
    "simpo": TrainSimpoConfig,
    "grpo": TrainGrpoConfig,
}


def command_of(path):
    """The class that reads a file, by its directory or the first word of its name."""
    if path.parent.name == "sampler":
        return SampleConfig
    return COMMANDS[path.stem.split("_")[0]]


def test_there_are_configurations():
    assert {"demo", "simpo_tiny", "sample_llama8b_multihost"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "config")))
def test_every_configuration_parses(path):
    parse_arguments(command_of(path), ["--config_path", str(path)])


def test_simpo_on_a_pod_is_what_was_promised():
    path = ROOT / "config" / "simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml"
    config = parse_arguments(TrainSimpoConfig, ["--config_path", str(path)])
    assert config.trainer.train_batch_size == 256 and config.trainer.mesh_shape == "auto"
    samples = config.inference_eval
    assert (samples.enabled, samples.eval_every, samples.max_new_tokens) == (True, 10, 64)
    assert (samples.temperature, samples.max_seq_len) == (0.7, 512)
    assert config.loss_fn.beta == 2.5 and config.model is None

    class Pod:
        shape = {"dp": 1, "fsdp": 32, "tp": 1}

    assert config.trainer.microbatches(Pod()) == 4


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem.startswith("grpo")], ids=lambda path: path.stem)
def test_samples_of_solutions_may_be_as_long_as_in_training(path):
    config = parse_arguments(TrainGrpoConfig, ["--config_path", str(path)])
    assert config.inference_eval.max_new_tokens == config.rollout.max_new_tokens


SAMPLER = ROOT / "config" / "sampler"


@pytest.mark.parametrize(
    ("name", "mode", "prompts", "new_tokens", "hosts"),
    [
        ("", "global_mesh", 5, 512, 2),
        ("_real", "global_mesh", 100, 4096, 2),
        ("_128prompts_2048_hostdp_wandb_v5p16", "host_data_parallel", 128, 2048, 2),
        ("_128prompts_2048_hostdp_wandb_v5p32", "host_data_parallel", 128, 2048, 4),
    ],
)
def test_sampling_on_a_pod_is_what_was_promised(name, mode, prompts, new_tokens, hosts, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = parse_arguments(SampleConfig, ["--config_path", str(SAMPLER / f"sample_llama8b_multihost{name}.yaml")])
    assert (config.inference_mode, config.max_new_tokens) == (mode, new_tokens)
    assert config.trainer.distributed.require_process_count == hosts
    assert len(read_prompts(config.prompts)) == prompts
    assert config.max_new_tokens < config.engine.max_seq_len
