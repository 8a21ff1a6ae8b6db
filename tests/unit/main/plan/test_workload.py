"""Keys of a workload, from the root of its configuration."""

import jax
import numpy as np
import pytest

from lockstep.engine import Engine, EngineConfig
from lockstep.errors import ConfigError
from lockstep.main.plan.workload import (
    Infeasibility,
    SamplingWorkload,
    TrainingWorkload,
    key_in,
    largest_in,
    place_of,
    with_common_largest,
)
from lockstep.training import OptimizerConfig, TrainerConfig, lm_loss
from tests.unit.engine.models import mesh_of, model_on, request

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
