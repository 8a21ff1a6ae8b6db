"""Log-probabilities of the tokens of a batch, through a model."""

import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig
from lockstep.models.trainable import skeleton
from lockstep.training import lm_loss
from lockstep.training.objectives import logprobs, token_logprobs
from lockstep.training.objectives.logprobs import OutputLayer
from lockstep.training.objectives.targets import target_mask
from tests.unit.training.objectives.tables import table_model

CONFIG = LlamaConfig(
    max_seq_len=16, hidden_dim=16, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=1,
    gradient_checkpointing=False,
)  # fmt: skip


def llama(vocab=300):
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * draw.standard_normal(leaf.shape, np.float32)), skeleton(vocab, CONFIG)
    )


def test_token_logprobs_by_hand():
    found = token_logprobs(table_model, {"tokens": jnp.array([[0, 1, 2, 0]])})
    np.testing.assert_allclose(np.exp(found), [[0.2, 0.25, 0.7]], rtol=1e-6)


def test_axes_before_the_position_are_kept():
    tokens = jnp.array([[[0, 1, 2], [2, 0, 3]], [[0, 3, 3], [1, 1, 1]]])
    found = token_logprobs(table_model, {"tokens": tokens})
    np.testing.assert_allclose(found[0, 1], np.log([0.7, 0.4]), rtol=1e-5)
    assert found.shape == (2, 2, 2)


def test_a_policy_has_a_temperature_and_no_ids_that_are_no_tokens(monkeypatch):
    """Result and gradient are those of the formula, with all logits and, where they are many, in blocks."""
    model, draw = llama(), np.random.default_rng(1)
    tokens, weights = jnp.asarray(draw.integers(0, 290, (2, 3, 8))), draw.standard_normal((2, 3, 7)).astype(np.float32)
    assert isinstance(model, OutputLayer) and not isinstance(table_model, OutputLayer)

    def formula(model):
        states = model.activations(hax.named(tokens, ("group", "batch", "position")))
        logits = model.logits(states).rearrange(("group", "batch", "position", "vocab")).array[..., :290] / 0.7
        return jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :, :-1], tokens[..., 1:, None], axis=-1)[..., 0]

    def ours(model):
        return token_logprobs(model, {"tokens": tokens}, temperature=0.7, vocab_size=290)

    def with_gradient(function):
        return jax.jit(jax.value_and_grad(lambda model: jnp.sum(weights * function(model)))).lower(model)

    expected = with_gradient(formula).compile()(model)
    for most in (1, logprobs.LOGITS_BYTES):
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", most)
        lowered = with_gradient(ours)
        assert ("6x8x300xf32" in lowered.as_text()) == (most > 1)
        for one, other in zip(*map(jax.tree.leaves, (lowered.compile()(model), expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_packed_documents_cost_what_each_costs_alone():
    model, draw = llama(), np.random.default_rng(2)
    documents = [draw.integers(1, 300, length) for length in (5, 1, 7)]
    packed = np.zeros((1, 16), np.int32)
    segments = np.zeros((1, 16), np.int32)
    begin = 0
    for number, document in enumerate(documents, start=1):
        packed[0, begin : begin + len(document)] = document
        segments[0, begin : begin + len(document)] = number
        begin += len(document)
    batch = {"tokens": packed, "segment_ids": segments, "loss_mask": np.ones((1, 16), bool)}
    together = jax.jit(lm_loss)(model, batch)
    alone = [
        lm_loss(model, {"tokens": document[None], "loss_mask": np.ones((1, len(document)), bool)})
        for document in documents
    ]
    assert float(together.weight) == sum(float(one.weight) for one in alone) == 4 + 0 + 6
    assert float(together.total) == pytest.approx(sum(float(one.total) for one in alone), rel=1e-5)
    one_document = lm_loss(model, {**batch, "segment_ids": (segments > 0).astype(np.int32)})
    assert abs(float(one_document.total) / 12 - float(together.total) / 10) > 1e-3, "documents would attend to others"


def test_padding_and_first_tokens_of_documents_are_no_targets():
    batch = {"loss_mask": jnp.array([[1, 1, 1, 1, 0, 1, 1, 1]]), "segment_ids": jnp.array([[1, 1, 2, 2, 2, 2, 0, 0]])}
    np.testing.assert_array_equal(target_mask(batch), [[True, False, True, False, True, False, False]])
    np.testing.assert_array_equal(target_mask({"loss_mask": batch["loss_mask"]}), batch["loss_mask"][:, 1:])


def test_packed_rows_need_a_model_that_takes_segment_ids():
    batch = {"tokens": jnp.array([[0, 1]]), "segment_ids": jnp.array([[1, 1]])}
    with pytest.raises(ConfigError, match=r"segment_ids, and the model cannot be called with.*do not pack rows"):
        token_logprobs(table_model, batch)
    assert token_logprobs(lambda ids, segments: table_model(ids), batch).shape == (1, 1)


def test_lm_loss_is_the_mean_over_unmasked_tokens():
    # Targets: 1 after 0 (0.2), 2 after 1 (masked), 0 after 2 (0.7); the mask of the first token has no effect.
    batch = {"tokens": jnp.array([[0, 1, 2, 0]]), "loss_mask": jnp.array([[True, True, False, True]])}
    parts = lm_loss(table_model, batch)
    assert float(parts.weight) == 2
    assert float(parts.total) == pytest.approx(-math.log(0.2) - math.log(0.7), rel=1e-6)
