"""The configuration of train-grpo, and that the command cannot train yet."""

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.main.train_grpo import TrainGrpoConfig, main

CONFIG = str(Path(__file__).parents[3] / "config" / "grpo_gsm8k_qwen25_3b_v6e_8.yaml")


def read(*arguments):
    return parse_arguments(TrainGrpoConfig, ["--config_path", CONFIG, *arguments])


def test_a_batch_is_made_of_whole_groups():
    with pytest.raises(ConfigError, match=r"train_batch_size is 20 answers .* Use a multiple of 8, e\.g\. 16\."):
        read("--trainer.train_batch_size", "20", "--rollout.n_generations", "8")


def test_a_row_has_room_for_prompt_and_answer():
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens is 64 and data\.max_seq_len is 64; .* less than"):
        read("--rollout.max_new_tokens", "64", "--data.max_seq_len", "64")


@pytest.mark.parametrize(("coefficient", "reference"), [("0", False), ("0.04", True)])
def test_a_reference_is_needed_where_the_loss_compares_with_one(coefficient, reference):
    config = read("--kl_coefficient", coefficient)
    assert config.has_reference == reference and config.objective.kl_coefficient == float(coefficient)


def test_answers_are_sampled_as_the_rollout_says():
    config = read("--rollout.max_new_tokens", "17")
    assert config.rollouts is config.rollout and config.rollouts.max_new_tokens == 17


def test_the_command_says_that_it_cannot_train_yet():
    with pytest.raises(ConfigError, match="cannot train yet"):
        main([])
