import jax.numpy as jnp
import numpy as np

from lockstep.engine import Engine, EngineConfig
from lockstep.models.attention import KvSpec
from tests.unit.engine.models import FAMILIES, VOCAB, mesh_of, mixed_requests, model_on


def test_k_and_v_of_a_head_are_neighbouring_rows() -> None:
    k, v = (np.random.default_rng(seed).standard_normal((3, 2, 5)).astype(np.float32) for seed in (0, 1))
    rows = KvSpec.join(jnp.asarray(k), jnp.asarray(v))
    assert rows.shape[1:] == KvSpec(kv_heads=2, head_size=5).shape
    np.testing.assert_array_equal(rows[:, :2], np.stack([k[:, 0], v[:, 0]], axis=1))
    for part, whole in zip(KvSpec.split(rows), (k, v), strict=True):
        np.testing.assert_array_equal(part, whole)


def test_a_pool_takes_what_its_spec_says() -> None:
    mesh = "1,1,2"
    engine = Engine(EngineConfig(max_seqs=4, page_size=8), mesh_of(mesh), vocab_size=VOCAB)
    engine.prepare(model_on(mesh, FAMILIES["gemma3"]), mixed_requests())
    model, sizes = engine.decode_model, engine.sizes
    positions = FAMILIES["gemma3"].num_layers * sizes.pages * sizes.page_size
    pool = engine.programs["new_cache"].memory().output_size_in_bytes
    assert pool == positions * model.heads.kept.bytes(model.kv_dtype) == sizes.pages * sizes.page_size * model.kv_bytes
