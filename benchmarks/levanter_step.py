"""Levanter's own train step for a model, a mesh and a batch, compiled for a TPU slice; no TPU is needed.

``benchmarks/tpu_train_step.py --maker levanter`` compares it with ours. Levanter's ``Trainer`` makes the step. There
are no devices: its arguments are shapes, and it is told that the devices of the process are those of the slice.
"""

import contextlib
import functools
import unittest.mock
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jmp
from haliax.partitioning import infer_resource_partitions
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.qwen3_moe import Qwen3MoeConfig
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig, NoopTracker, set_global_tracker
from levanter.trainer import Trainer, TrainerConfig, TrainerState

from lockstep.models import LlamaConfig as OurConfig


def lower_step(
    model: OurConfig, vocab_size: int, devices: Sequence[jax.Device], *, sequences: int, length: int, at_a_time: int,
    steps: int,
) -> jax.stages.Lowered:  # fmt: skip
    """Trace the train step of Levanter's defaults: FSDP, AdamW, layers recomputed, splash attention, fused loss.

    Args:
        model: The shape of the model, a Llama or a Qwen3 with experts.
        vocab_size: The number of token ids.
        devices: The devices of the slice.
        sequences: The number of sequences of a batch.
        length: The number of tokens of each.
        at_a_time: The number of sequences of a device's microbatch.
        steps: The number of steps of the run.
    """
    config = TrainerConfig(
        id="tpu-train-step", tracker=NoopConfig(), train_batch_size=sequences, per_device_parallelism=at_a_time,
        num_train_steps=steps, mp=jmp.get_policy("p=f32,c=bfloat16"), require_accelerator=False, log_jaxprs=False,
        log_xla_hlo=False,
    )  # fmt: skip
    set_global_tracker(NoopTracker())

    def loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    with _as_if_here(devices):
        optimizer = AdamConfig().build(steps)
        trainer = Trainer(config, optimizer, loss, add_default_hooks=False)
        mesh, parameters = trainer.device_mesh, trainer.parameter_axis_mapping
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(parameters):
            state = eqx.filter_eval_shape(lambda: _state(model, vocab_size, optimizer, trainer.mp))
            batch = eqx.filter_eval_shape(lambda: _examples(sequences, length))
        # Outside of the mesh: haliax makes an array to find out whether it is traced.
        state = _placed(state, parameters, mesh)
        batch = _placed(batch, trainer.compute_axis_mapping, mesh)
        arrays, rest = eqx.partition((state, batch), _is_shape)
        step = functools.partial(trainer._train_step, _no_hooks=True)

        def run(state_arrays: Any, batch_arrays: Any) -> Any:
            state, batch = eqx.combine((state_arrays, batch_arrays), rest)
            return eqx.filter(step(state, (batch,), {}), eqx.is_array)

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(parameters):
            results = jax.eval_shape(run, *arrays)
        # As `named_jit` does it, which takes arrays for arguments, and no shapes.
        shardings = infer_resource_partitions(results, parameters, mesh)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(parameters):
            return jax.jit(run, donate_argnums=0, out_shardings=shardings).lower(*arrays)


def _state(model: OurConfig, vocab_size: int, optimizer: Any, policy: jmp.Policy) -> TrainerState:
    key = jax.random.key(0)
    shape = {
        name: getattr(model, name)
        for name in (
            "max_seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "tie_word_embeddings",
        )
    }  # fmt: skip
    experts = model.experts
    config: Any = LlamaConfig(**shape) if experts is None else Qwen3MoeConfig(
        **shape, num_experts=experts.num_experts, num_experts_per_tok=experts.num_experts_per_tok,
        moe_intermediate_dim=model.expert_dim, norm_topk_prob=experts.norm_topk_prob,
    )  # fmt: skip
    made = config.build(hax.Axis("vocab", vocab_size), key=key)
    return TrainerState.init(optimizer, made, key=key, mp=policy)


def _examples(sequences: int, length: int) -> LmExample:
    Batch, Position = hax.Axis("batch", sequences), hax.Axis("position", length)
    return hax.vmap(LmExample.causal, Batch)(hax.zeros((Batch, Position), dtype=int))


def _placed(shapes: Any, mapping: Any, mesh: jax.sharding.Mesh) -> Any:
    """The shapes with the shardings that Levanter gives their arrays."""
    arrays, rest = eqx.partition(shapes, _is_shape)
    # There is one sharding for each haliax array, or plain one.
    structs = jax.tree.map(
        lambda sharding, part: jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), part
        ),
        infer_resource_partitions(arrays, mapping, mesh),
        arrays,
    )
    return eqx.combine(structs, rest)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


@contextlib.contextmanager
def _as_if_here(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Levanter asks JAX about this process to choose a mesh, an attention and a loss: answer as the slice would."""
    answers = {
        "devices": lambda *_: list(devices), "local_devices": lambda *_, **__: list(devices),
        "device_count": lambda *_: len(devices), "default_backend": lambda: "tpu",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(unittest.mock.patch.object(jax, name, answer))
        yield
