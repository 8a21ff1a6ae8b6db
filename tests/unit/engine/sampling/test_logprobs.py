"""The most probable tokens of a step."""

import jax.numpy as jnp
import numpy as np

from lockstep.engine.sampling.logprobs import top_logprobs
from lockstep.engine.sampling.sampler import Sampled
from lockstep.placement import make_decode_mesh
from tests.sampling_oracle import log_softmax
from tests.unit.engine.models import mesh_of


def top(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    largest = logits.max(axis=1)
    nothing = jnp.zeros(len(logits))
    sampled = Sampled(
        token=jnp.zeros(len(logits), jnp.int32),
        logprob=nothing,
        sampled_logprob=nothing,
        max_logit=jnp.asarray(largest),
        logsumexp=jnp.asarray(np.log(np.exp(logits - largest[:, None]).sum(axis=1))),
    )
    ids, values = top_logprobs(jnp.asarray(logits), count, sampled, make_decode_mesh(mesh_of("1,1,1"), 1))
    return np.asarray(ids), np.asarray(values)


def test_they_come_most_probable_first_with_the_models_log_probabilities() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)
    ids, values = top(logits, 4)
    want = np.stack([log_softmax(row) for row in logits])
    np.testing.assert_array_equal(ids, np.argsort(-want, axis=1)[:, :4])
    np.testing.assert_allclose(values, np.take_along_axis(want, ids, axis=1), atol=1e-6)


def test_equal_ones_come_by_token_id() -> None:
    ids, _ = top(np.array([[0.0, 1.0, 0.0, 1.0, 1.0]], np.float32), 4)
    assert ids.tolist() == [[1, 3, 4, 0]]
