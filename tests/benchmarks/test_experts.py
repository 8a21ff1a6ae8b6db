"""What the benchmark of experts measures, and what its floor multiplies."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import contestants, experts
from benchmarks.shapes import random_weights
from lockstep.models import Experts, Qwen3MoeConfig
from lockstep.placement import make_mesh

MODEL = Qwen3MoeConfig(
    hidden_dim=16, intermediate_dim=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    experts=Experts(num_experts=8, num_experts_per_tok=2, intermediate_dim=4),
)  # fmt: skip


# 4 tokens have 8 experts, of which 5.5 differ.
@pytest.mark.parametrize(("tokens", "rows", "hits"), [(4, 1, 5), (64, 16, 8)])
def test_the_floor_multiplies_the_rows_of_the_experts_that_are_hit(tokens: int, rows: int, hits: int) -> None:
    weights = random_weights(make_mesh("1,1,1", jax.devices()[:1]), MODEL, vocab=32)
    text = str(jax.make_jaxpr(lambda x: contestants._products(MODEL, x, weights, None, 1))(jnp.ones((tokens, 16))))
    assert f"f32[{rows},4] = dot_general" in text and f"length={hits}\n" in text, text


def test_what_is_left_out_is_null(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(experts, "multiprocess", lambda *_: {"multiprocess_vs_floor": 0.5})
    monkeypatch.setattr(sys, "argv", ["experts", "--only", "multiprocess", "--json", str(tmp_path / "out.json")])
    assert experts.main() == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["multiprocess_vs_floor"] == 0.5 and found["decode_vs_floor"] is None is found["tokens_vs_levanter"]
