"""What layers keep of the past: the rows of the pool, and what else may be asked of it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from lockstep.engine import EngineConfig
from lockstep.engine.sizing.demand import desired_capacity, measure_demand
from lockstep.engine.sizing.memory_model import MemoryModel
from lockstep.models.attention.kv import FixedState, KvSpec, PagedKv, describe_kept
from lockstep.types import Drafts
from tests.unit.engine.models import request
from tests.unit.engine.sizing.made_up import models_on

FLOAT32, BYTES = jnp.dtype("float32"), 3000
LATENT = PagedKv(kv_heads=1, head_size=5, value_size=3)
STATE = FixedState(name="a state", bytes=BYTES)


def test_k_and_v_of_a_head_are_neighbouring_rows_and_a_latent_is_one():
    k, v = (np.random.default_rng(seed).standard_normal((3, 2, 5)).astype(np.float32) for seed in (0, 1))
    spec = PagedKv(kv_heads=2, head_size=5)
    rows = spec.join(jnp.asarray(k), jnp.asarray(v))
    assert rows.shape[1:] == spec.shape and spec.position_bytes(FLOAT32) == rows[0].nbytes
    np.testing.assert_array_equal(rows[:, :2], np.stack([k[:, 0], v[:, 0]], axis=1))
    for part, whole in zip(spec.split(rows), (k, v), strict=True):
        np.testing.assert_array_equal(part, whole)
    latent = k[:, :1]
    rows = LATENT.join(jnp.asarray(latent), jnp.asarray(latent[..., :3]))
    assert rows.shape[1:] == LATENT.shape and LATENT.position_bytes(FLOAT32) == rows[0].nbytes
    for part, whole in zip(LATENT.split(rows), (latent, latent[..., :3]), strict=True):
        np.testing.assert_array_equal(part, whole)


def test_a_state_takes_memory_by_the_sequence_and_rules_out_sharing_and_drafts():
    models = models_on(EngineConfig())
    requests = [dataclasses.replace(request(i, 20, 12, n_generations=2), drafts=Drafts(ngrams=True)) for i in range(3)]
    plain, demand = models[{"tensor": 1}], measure_demand(EngineConfig(), models, requests)
    mixed = dataclasses.replace(plain, kept=(*plain.kept[1:], STATE))
    with_state, without = (desired_capacity(EngineConfig(), model, demand) for model in (mixed, plain))
    assert (without.page_copies, with_state.page_copies) == (1, 0)
    assert without.draft_tokens and not with_state.draft_tokens and not with_state.verify_widths
    sizes = with_state
    less = sizes.pages * sizes.page_size * plain.kept[0].position_bytes(FLOAT32)
    pools = [MemoryModel(model).footprint(sizes).pool for model in (plain, mixed)]
    assert pools[1] == pools[0] - less + sizes.slots * BYTES
    text = describe_kept(mixed.kept, FLOAT32)
    assert text.endswith("; prefixes are not shared; drafts are not verified") and "2.93 KiB a sequence" in text
    assert "not" not in describe_kept(plain.kept, FLOAT32)
    assert all(isinstance(layer, KvSpec) for layer in mixed.kept)
