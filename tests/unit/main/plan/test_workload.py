"""Keys of a workload, from the root of its configuration."""

import jax
import numpy as np
import pytest

from lockstep.engine import EngineConfig
from lockstep.main.plan.workload import SamplingWorkload, TrainingWorkload
from lockstep.training import OptimizerConfig, TrainerConfig, lm_loss


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
