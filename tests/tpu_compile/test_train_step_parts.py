"""Attention and loss of a train step, compiled by the TPU compiler for every generation."""

import haliax as hax
import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from jax.sharding import NamedSharding, PartitionSpec

from lockstep.models.attention import CausalAttention, HeadArrays, self_attention
from lockstep.placement import COMPUTE_AXES, make_mesh
from lockstep.training.objectives.vocab_blocks import VocabBlocks
from lockstep.xla import Hlo, collectives, topology

SLICES = {"v4": "v4-8", "v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4"}
ROWS = ("dp", "fsdp")
HEADS = PartitionSpec(ROWS, None, "tp")


def mesh_of(generation, shape):
    return make_mesh(shape, topology(SLICES[generation]).devices)


@pytest.mark.parametrize(
    ("generation", "length", "head", "dtype", "attention"),
    [
        ("v4", 2048, 128, "bfloat16", CausalAttention(scale=0.1)),
        pytest.param("v5e", 2048, 64, "bfloat16", CausalAttention(scale=0.1), marks=pytest.mark.nightly),
        pytest.param(
            "v5p", 1900, 256, "float32", CausalAttention(scale=0.1, sliding_window=700, soft_cap=50.0),
            marks=pytest.mark.nightly,
        ),
        pytest.param("v6e", 1024, 80, "float32", CausalAttention(scale=0.1, soft_cap=30.0), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_attention_is_the_kernel_forward_and_backward(generation, length, head, dtype, attention):
    """Over a mesh that splits rows and heads, with documents; the scores of a row alone would take as much memory."""
    mesh = mesh_of(generation, "1,2,-1")
    tensor = mesh.shape["tp"]

    def struct(*shape, dtype=dtype, spec=HEADS):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(q, k, v, segments):
        arrays = HeadArrays(q, k, v, segments)
        out = self_attention(arrays, attention, backend="default", batch_axes=ROWS, head_axes="tp")
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    arguments = (
        struct(4, length, 2 * tensor, 4, head),
        *[struct(4, length, 2 * tensor, head)] * 2,
        struct(4, length, dtype="int32", spec=PartitionSpec(ROWS)),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()
    hlo = Hlo(compiled.as_text())
    kernels = [run for run in hlo.runs if run.op.kind == "custom-call" and "tpu_custom_call" in run.op.line]
    assert len(kernels) == 3, "forward, gradient of q, gradient of k and v"
    assert not [one for one in collectives(hlo, mesh.size) if one.bytes > 1024]
    # q, k, v with heads before positions, the result, its gradient, and the log-sum-exp in 128 lanes of float32.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 8 * length * (8 * max(head, 128) + 128) * 4


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v5p", pytest.param("v6e", marks=pytest.mark.nightly)])
def test_the_loss_gathers_the_output_layer_and_scatters_its_gradient_once_per_microbatch(generation):
    mesh = mesh_of(generation, "1,-1,1")
    rows, positions, embed, vocab, most = 2 * mesh.size, 512, 1024, 32768, 2**23

    def struct(*shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def total(head, states, targets):
        with hax.axis_mapping(COMPUTE_AXES):
            head = head.astype(jnp.bfloat16)
            named = hax.named(states, ("batch", "position", "embed")), hax.named(head, ("embed", "vocab"))
            blocks = VocabBlocks.of(*named, None, most=most)
            assert blocks is not None
            return jnp.sum(blocks(states, head, targets))

    def step(head, states, targets):
        def add(sums, microbatch):
            return sums + jax.grad(total)(head, *microbatch), None

        zeros = jax.lax.with_sharding_constraint(jnp.zeros_like(head), NamedSharding(mesh, PartitionSpec("fsdp")))
        return jax.lax.scan(add, zeros, (states, targets))[0]

    arguments = (
        struct(embed, vocab, dtype="float32", spec=PartitionSpec("fsdp")),
        struct(3, rows, positions, embed, dtype="bfloat16", spec=PartitionSpec(None, ROWS)),
        struct(3, rows, positions, dtype="int32", spec=PartitionSpec(None, ROWS)),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, out_shardings=arguments[0].sharding).lower(*arguments).compile()
    moved = [one for one in collectives(Hlo(compiled.as_text()), mesh.size) if one.bytes > 1024]
    assert [(one.kind, one.times) for one in moved] == [("all-gather", 3), ("reduce-scatter", 3)]
    assert sum(one.bytes for one in moved) == 2 * embed * vocab * (1 + 1 / mesh.size), "in bfloat16"
    logits = 4 * rows // mesh.size * positions * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2 * embed * vocab + 5 * most < logits * 3


@pytest.mark.nightly  # in make slow: the loss below
@pytest.mark.parametrize("axes", [("embed", "vocab"), ("vocab", "embed")])
def test_the_gradient_of_the_output_layer_is_made_as_it_is_returned(axes):
    """On one v6e, whose product would make it transposed: nothing copies it whole, or block by block."""
    mesh = make_mesh("1,1,1", topology("v6e-1").devices)
    sizes = {"embed": 1024, "vocab": 32768}
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = (tuple(sizes[axis] for axis in axes), "bfloat16"), ((2, 1024, 1024), "bfloat16"), ((2, 1024), "int32")

    def total(head, states, targets):
        named = hax.named(states, ("batch", "position", "embed")), hax.named(head, axes)
        return jnp.sum(VocabBlocks.of(*named, None, most=2**23)(states, head, targets))

    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes]
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(total)).lower(*arguments).compile()
    block = 4096 * sizes["embed"] * 2
    copied = [run.op for run in Hlo(compiled.as_text()).runs if run.op.kind == "copy" and run.op.bytes >= block]
    assert not copied and compiled.memory_analysis().temp_size_in_bytes < 2 * sizes["embed"] * sizes["vocab"]
