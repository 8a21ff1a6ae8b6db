"""examples/bonsai_qwen3.py on the real package: log-probabilities, tokens, and what its reader could have wrong."""

import dataclasses
import importlib.util
import sys
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.models import ReaderMismatchError, RotaryConfig, UnreadParameterError, check_reader, read_decoder

INSTALL = "pip install --no-deps git+https://github.com/jax-ml/bonsai"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("bonsai.models.qwen3.modeling", reason=f"JAX Bonsai is not installed: {INSTALL}")
    path = Path(__file__).parents[2] / "examples" / "bonsai_qwen3.py"
    spec = importlib.util.spec_from_file_location("example_bonsai", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_says_what_the_model_says(example, capsys):
    model = example.small_model()
    found = check_reader(model, partial(example.forward, model))
    assert found.gap < 1e-4 and found.unseen == ()
    example.main()
    answers = [eval(line.partition(" ")[2]) for line in capsys.readouterr().out.splitlines()[-2:]]
    for number, answer in enumerate(answers):
        tokens = [1, 2, 3 + number]
        for _ in range(8):
            tokens.append(int(np.argmax(example.forward(model, jnp.asarray([tokens]))[0, -1])))
        assert list(answer) == tokens[3:]


def test_a_reader_that_follows_its_configuration_is_told_of_the_rope_base(example):
    model = example.small_model()
    config, weights = read_decoder(model)
    followed = dataclasses.replace(config, rope=RotaryConfig(theta=float(model.config.rope_theta)))
    with pytest.raises(ReaderMismatchError, match=r"rope\.theta is 10000: it should be 1e\+06"):
        check_reader((followed, weights), partial(example.forward, model))


def test_an_adapter_is_not_forgotten(example):
    model = example.small_model()
    model.layers[0].attn.q_proj.lora_a = example.nnx.LoRAParam(jnp.ones((32, 2)))
    with pytest.raises(UnreadParameterError, match=r"layers\.0\.attn\.q_proj\.lora_a.*merge_lora"):
        read_decoder(model)
