"""Log-probabilities by blocks of the vocabulary, against all logits at once."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.placement import COMPUTE_AXES, PARAMETER_AXES, compute_axes, make_mesh
from lockstep.training.objectives.targets import NO_TARGET
from lockstep.training.objectives.vocab_blocks import VocabBlocks
from lockstep.xla import Hlo, collectives

ROWS, POSITIONS, EMBED = 4, 6, 8
ENTROPY = 0.7  # the weight of an entropy beside that of a log-probability
MOST = 2 * 4 * 24 * 128  # of all tokens, the logits of 128 token ids and their gradients
AXES = {False: ("embed", "vocab"), True: ("vocab", "embed")}


def arrays(vocab, vocab_first=False, dtype=np.float32):
    draw = np.random.default_rng(0)
    states = draw.standard_normal((ROWS, POSITIONS, EMBED)).astype(dtype)
    head = draw.standard_normal((EMBED, vocab)).astype(dtype)
    targets = draw.integers(0, vocab, (ROWS, POSITIONS)).astype(np.int32)
    targets[0, :3] = 0, vocab - 1, vocab // 2  # of the first and the last block, and beside a border between devices
    weights = draw.standard_normal((ROWS, POSITIONS)).astype(np.float32)
    return states, head.T if vocab_first else head, targets, weights


def blockwise(states, head, targets, *, vocab_first=False, cap=None, most=MOST, **softmax):
    named = (hax.named(states, ("batch", "position", "embed")), hax.named(head, AXES[vocab_first]))
    blocks = VocabBlocks.of(*named, cap, most=most, least=128, **softmax)
    assert blocks is not None
    return blocks(states, head, targets)


def dense(states, head, targets, *, vocab_first=False, cap=None, temperature=1.0, vocab_size=None):
    logits = jnp.dot(states, head.T if vocab_first else head, preferred_element_type=jnp.float32)
    logits = (logits if cap is None else cap * jnp.tanh(logits / cap))[..., :vocab_size] / temperature
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def blockwise_both(states, head, targets, *, vocab_first=False, cap=None, most=MOST, **softmax):
    """The log-probability and the entropy of each token, with weights of their own in a sum."""
    named = (hax.named(states, ("batch", "position", "embed")), hax.named(head, AXES[vocab_first]))
    blocks = VocabBlocks.of(*named, cap, most=most, least=128, **softmax)
    logprobs, entropies = blocks.with_entropy(states, head, targets)
    return logprobs + ENTROPY * entropies


def dense_both(states, head, targets, *, vocab_first=False, cap=None, temperature=1.0, vocab_size=None):
    """The same of all logits at once: the entropy is the mean of the negative logarithms."""
    logits = jnp.dot(states, head.T if vocab_first else head, preferred_element_type=jnp.float32)
    logits = (logits if cap is None else cap * jnp.tanh(logits / cap))[..., :vocab_size] / temperature
    logprobs = jax.nn.log_softmax(logits)
    entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0] + ENTROPY * entropies


def with_gradients(function, inputs, mesh=None, **options):
    states, head, targets, weights = inputs
    mapping = {} if mesh is None else compute_axes(mesh)

    def total(states, head):
        with hax.axis_mapping(mapping):
            found = function(states, head, targets, **options)
        return jnp.sum(found * weights), found

    gradients = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    if mesh is None:
        of, found = gradients(states, head)
        return found, *of
    rows = NamedSharding(mesh, PartitionSpec(("dp", "fsdp")))
    stored = PartitionSpec(*(PARAMETER_AXES[axis] for axis in AXES[options.get("vocab_first", False)]))
    with jax.set_mesh(mesh):
        of, found = gradients(jax.device_put(states, rows), jax.device_put(head, NamedSharding(mesh, stored)))
    return found, *of


@pytest.mark.parametrize(
    ("mesh", "vocab", "vocab_first", "cap"),
    [
        *((mesh, 604, True, 1.5) for mesh in (None, "2,1,2", "1,2,2", "fsdp=2,cp=2")),
        (None, 512, False, None),
        *(pytest.param(mesh, 512, False, None, marks=pytest.mark.slow) for mesh in ("2,1,2", "1,2,2", "fsdp=2,cp=2")),
    ],
)
def test_blocks_change_neither_the_result_nor_a_gradient(mesh, vocab, vocab_first, cap):
    """604 is no multiple of a block, on no mesh: the last block begins inside the one before it."""
    inputs, options = arrays(vocab, vocab_first), {"vocab_first": vocab_first, "cap": cap}
    mesh = make_mesh(mesh, jax.devices()[:4]) if mesh else None
    parts = 1 if mesh is None else mesh.size // mesh.shape["tp"]
    found = with_gradients(blockwise, inputs, mesh, most=MOST // parts, **options)
    for ours, theirs in zip(found, with_gradients(dense, inputs, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("mesh", "vocab", "cap", "softmax"),
    [
        *((mesh, 604, 1.5, {"temperature": 0.7, "vocab_size": 590}) for mesh in (None, "2,1,2")),
        (None, 604, None, {"vocab_size": 120}),  # all blocks but the first are without a token
        *(pytest.param(mesh, 512, None, {}, marks=pytest.mark.slow) for mesh in ("1,2,2", "fsdp=2,cp=2")),
    ],
)
def test_the_entropy_of_blocks_is_that_of_all_logits_and_its_gradient_too(mesh, vocab, cap, softmax):
    states, head, targets, weights = arrays(vocab, vocab_first=True)
    inputs = (states, head, targets % softmax.get("vocab_size", vocab), weights)
    mesh = make_mesh(mesh, jax.devices()[:4]) if mesh else None
    parts, options = 1 if mesh is None else mesh.size // mesh.shape["tp"], {"vocab_first": True, "cap": cap} | softmax
    blocks = with_gradients(blockwise_both, inputs, mesh, most=MOST // parts, **options)
    for ours, theirs in zip(blocks, with_gradients(dense_both, inputs, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


@pytest.mark.parametrize(
    "mesh", ["1,2,2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in (None, "2,1,2", "fsdp=2,cp=2"))]
)
@pytest.mark.parametrize("function", [(blockwise, dense), (blockwise_both, dense_both)], ids=["logprobs", "entropies"])
def test_of_tokens_that_are_targets_alone_results_and_gradients_are_those_of_all(mesh, function):
    """Each device has some targets among the tokens of its own, of which one quarter or more are left out."""
    states, head, targets, weights = arrays(604, vocab_first=True)
    masked = np.where(np.arange(POSITIONS) % 6 < [[1], [0], [3], [2]], targets, NO_TARGET)
    mask = masked != NO_TARGET
    mesh = make_mesh(mesh, jax.devices()[:4]) if mesh else None
    parts, options = 1 if mesh is None else mesh.size // mesh.shape["tp"], {"vocab_first": True, "cap": 1.5}
    ours = with_gradients(
        function[0], (states, head, masked, weights), mesh, most=MOST // parts, targets_only=True, **options
    )
    theirs = with_gradients(function[1], (states, head, targets, weights * mask), **options)
    for own, value in zip(ours, (theirs[0] * mask, *theirs[1:]), strict=True):
        np.testing.assert_allclose(own, value, atol=3e-5)


def test_what_a_quarter_without_targets_has_is_not_read():
    states, head, targets, weights = arrays(512)
    targets[1:] = NO_TARGET  # 6 of 24 tokens are left, of which the first third is computed
    states[3] = np.nan
    results = with_gradients(blockwise, (states, head, targets, weights), targets_only=True)
    assert all(np.isfinite(result).all() for result in results)


def test_a_certain_token_has_no_entropy_and_a_finite_gradient():
    """Its probability is 1 and those of all others are 0, whose logarithms are no numbers."""
    states, head, targets, weights = arrays(604)
    inputs = (1e4 * states, head, targets, weights)
    values, *gradients = with_gradients(lambda *x: blockwise_both(*x) - blockwise(*x), inputs)
    assert np.abs(values).max() < 1e-3 and all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("mesh", "vocab", "vocab_first", "cap", "vocab_size"),
    [
        *((mesh, 604, True, 1.5, 300) for mesh in (None, "2,1,2", "1,2,2")),
        ("2,1,2", 512, False, None, 200),
        *(pytest.param(mesh, 512, False, None, 200, marks=pytest.mark.slow) for mesh in (None, "1,2,2")),
    ],
)
def test_logits_are_over_the_temperature_and_ids_that_are_no_tokens_have_no_probability(
    mesh, vocab, vocab_first, cap, vocab_size
):
    """Whole blocks have no token, and on two devices all that the second has of the vocabulary."""
    states, head, targets, weights = arrays(vocab, vocab_first)
    inputs = states, head, np.minimum(targets, vocab_size - 1), weights
    options = {"vocab_first": vocab_first, "cap": cap, "temperature": 0.5, "vocab_size": vocab_size}
    mesh = make_mesh(mesh, jax.devices()[:4]) if mesh else None
    rows = 1 if mesh is None else mesh.shape["dp"] * mesh.shape["fsdp"]
    found = with_gradients(blockwise, inputs, mesh, most=MOST // rows, **options)
    for ours, theirs in zip(found, with_gradients(dense, inputs, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


def test_gradients_have_the_dtype_of_what_they_are_of_and_the_log_probabilities_are_float32():
    inputs = arrays(512, dtype=jnp.bfloat16)
    found, of_states, of_head = with_gradients(blockwise, inputs)
    exact = with_gradients(dense, [np.asarray(x, np.float32) for x in inputs[:2]] + list(inputs[2:]))
    assert (found.dtype, of_states.dtype, of_head.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    for ours, theirs, tolerance in zip((found, of_states, of_head), exact, (2e-5, 2.0**-6, 2.0**-6), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, atol=tolerance * np.abs(theirs).max())


def test_no_device_has_all_logits_and_the_output_layer_travels_once_each_way():
    mesh, vocab = make_mesh("1,4,1", jax.devices()[:4]), 512
    states, head, targets, weights = arrays(vocab, dtype=jnp.bfloat16)
    rows, stored = (NamedSharding(mesh, PartitionSpec(axis)) for axis in (("dp", "fsdp"), "fsdp"))

    def step(states, head, targets):
        def total(states, head):
            with hax.axis_mapping(COMPUTE_AXES):
                return jnp.sum(blockwise(states, head, targets, most=MOST // 4) * weights)

        return jax.value_and_grad(total, argnums=(0, 1))(states, head)

    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in ((states, rows), (head, stored), (targets, rows))
    ]
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, out_shardings=(None, (rows, stored))).lower(*structs)
    # 24 tokens, 6 on a device, and the whole vocabulary or a block of it.
    assert not any(f"{tokens}x512x" in lowered.as_text() for tokens in (6, 24)) and "6x128xf32" in lowered.as_text()
    assert "reduce_scatter" in lowered.as_text() and "bf16" in lowered.as_text()
    moved = [one for one in collectives(Hlo(lowered.compile().as_text()), 4) if one.bytes > 1024]
    assert [(one.kind, one.times) for one in moved] == [("all-gather", 1), ("reduce-scatter", 1)]


def test_few_logits_need_no_blocks():
    states, head, *_ = arrays(128)
    named = hax.named(states, ("batch", "position", "embed")), hax.named(head, AXES[False])
    assert VocabBlocks.of(*named, None, most=MOST) is None
    assert VocabBlocks.of(*named, None, most=MOST - 1).size == 128
    assert VocabBlocks.of(*named, None, most=1).size == 128, "no smaller than a tile"
