"""Every configuration that is shipped can be read by its command."""

from pathlib import Path

import pytest

from lockstep.main.arguments import parse_arguments
from lockstep.main.train_lm import TrainLmConfig
from lockstep.main.train_simpo import TrainSimpoConfig

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "config").rglob("*.yaml"))
COMMANDS = {"demo": TrainLmConfig, "train_lm": TrainLmConfig, "lm": TrainLmConfig, "simpo": TrainSimpoConfig}


def command_of(path):
    """The class that reads a file, by the first word of its name."""
    return COMMANDS[path.stem.split("_")[0]]


def test_there_are_configurations():
    assert {"demo", "simpo_tiny"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_parses(path):
    parse_arguments(command_of(path), ["--config_path", str(path)])


def test_simpo_on_a_pod_is_what_was_promised():
    path = ROOT / "config" / "simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml"
    config = parse_arguments(TrainSimpoConfig, ["--config_path", str(path)])
    assert config.trainer.train_batch_size == 256 and config.trainer.mesh_shape == "auto"
    samples = config.inference_eval
    assert (samples.enabled, samples.eval_every, samples.max_new_tokens) == (True, 10, 64)
    assert (samples.temperature, samples.max_seq_len) == (0.7, 512)
    assert config.objective.beta == 2.5 and config.model is None

    class Pod:
        shape = {"dp": 1, "fsdp": 32, "tp": 1}

    assert config.trainer.microbatches(Pod()) == 4
