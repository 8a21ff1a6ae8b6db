"""The floating-point operations of a train step, and the share of a pipeline's steps that do nothing."""

from jax.sharding import Mesh

from lockstep.models import adapter_products, layer_kinds, layer_products, recomputes_attention, recomputes_layers
from lockstep.models.attention import attention_products
from lockstep.placement import CP, PP, data_shards
from lockstep.plan.workload import Workload
from lockstep.training import needs_vocab_blocks


def flops_on(workload: Workload, mesh: Mesh) -> float:
    """The floating-point operations of a train step on a mesh, in all of its devices together."""
    training = workload.training
    assert training is not None
    parts = 1 if PP in mesh.shape else training.microbatches(mesh)
    rows = training.trainer.train_batch_size // data_shards(mesh) // parts
    tokens = rows * training.sequences_per_row * training.length // mesh.shape.get(CP, 1)
    vocab_blocks = needs_vocab_blocks(tokens, workload.vocab_size // mesh.shape["tp"])
    return step_flops(workload, vocab_blocks=vocab_blocks, idle=training.bubble(mesh))


def step_flops(workload: Workload, *, vocab_blocks: bool, idle: float = 0.0) -> float:
    """The floating-point operations of a train step.

    They are 2 per weight and token forward, 4 backward, and 2 again for what is computed twice: products of layers, as
    far as a gradient needs them, and logits, because they are made in blocks (all tokens are targets). A frozen weight
    has no gradient, so it needs 2 backward. Attention is counted as it is computed, and so are layers in a stage that
    has no microbatch.
    """
    training, config = workload.training, workload.model
    assert training is not None
    again = recomputes_layers(config.gradient_checkpointing)
    forwards = 2 if recomputes_attention(config.gradient_checkpointing) else 1
    tokens = training.trainer.train_batch_size * training.sequences_per_row * training.length
    pairs = sum(
        products * attention_products(config.attn_backend, training.length, kind.window, forwards=forwards)
        for products, kind in zip(config.pair_products, layer_kinds(config), strict=True)
    )
    backwards, adapters = 2, 0.0
    if training.lora is not None:
        backwards = 1
        adapters = adapter_products(training.lora.shapes(config), config)
    products = (1 + backwards) * layer_products(config) + pairs + (3 + again) * adapters
    products += layer_products(config, again=True) if again else 0.0
    products /= 1 - idle
    output = config.hidden_dim * workload.vocab_size * (backwards + (2 if vocab_blocks else 1))
    return 2.0 * (products + output) * tokens
