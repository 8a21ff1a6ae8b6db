"""The configuration of the sampler."""

import pytest

from lockstep.batch_inference import JobConfig, SampleConfig
from lockstep.errors import ConfigError, PromptError


def config(**values):
    return SampleConfig(prompts=["one"], **({"hf_checkpoint": "here"} | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"checkpoint_path": "there"},
            "exactly one of hf_checkpoint and checkpoint_path is needed, but both are given",
        ),
        ({"hf_checkpoint": None}, "neither is given"),
        ({"n_rounds": 0}, "n_rounds is 0; it must be at least 1"),
        ({"seed": 2**32 - 1, "n_rounds": 2}, "seed must be 0 to 4294967294"),
        ({"max_prompts_per_batch": 0}, "max_prompts_per_batch is 0"),
        ({"inference_mode": "both"}, "inference_mode is 'both'; it must be one of global_mesh, host_data_parallel"),
        ({"host_data_parallel_output_dir": ""}, "is empty. Use a directory, a URL, or null"),
        ({"top_p": 0.5}, "top_p is 0.5 and temperature is 0.*would do nothing"),
        ({"write_parquet": True, "enable_host_rows_gather": False}, "there is no merged file to write"),
        ({"stop": "end"}, r"Use \['end'\]"),
        ({"metrics": ["bleu"]}, "metric 'bleu' is not known"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"drafts": "last_round"}, "drafts is last_round; the sampler keeps no earlier answers.*Use ngram or auto"),
        ({"drafts": "yes"}, "drafts is 'yes'; it must be one of auto, last_round, ngram, none"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        config(**values)


def test_empty_prompts_and_wrong_names_are_refused():
    with pytest.raises(PromptError, match="prompts holds no prompts"):
        SampleConfig(hf_checkpoint="here", prompts=[])
    with pytest.raises(ConfigError, match="trainer.run_id is 'a/b'"):
        JobConfig(run_id="a/b")


def test_every_round_has_a_seed_of_its_own():
    two = config(n_rounds=2, seed=7, n_generations=3)
    assert [two.sampling_params((1,), round_).seed for round_ in (0, 1)] == [7, 8]
    assert two.sampling_params((1,), 1).stop_token_ids == (1,)
