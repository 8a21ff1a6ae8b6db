"""The training state of a plan: what is on the devices for the whole run, as shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
from jax.sharding import Mesh

from lockstep.main.plan.workload import Workload
from lockstep.models import LlamaLMHeadModel, LoraModel, skeleton, split_trained
from lockstep.placement.device import block_bytes
from lockstep.training import busiest_bytes, parameter_shardings, state_structs


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The training state, which is on the devices for the whole run.

    Args:
        structs: The state as shapes with shardings.
        parameters: The bytes per device of the model's parameters.
        trained: The bytes per device of those that are trained.
        optimizer: The bytes per device of the optimizer's state.
        reference: The bytes per device of a frozen copy of the model.
        checkpoint: The bytes that the host which writes most writes of a checkpoint.
    """

    structs: Any
    shardings: Any
    parameters: int
    trained: int
    optimizer: int
    reference: int
    checkpoint: int

    @property
    def resident(self) -> int:
        """The bytes per device of all of it."""
        return self.parameters + self.optimizer + self.reference


def make_state(workload: Workload, mesh: Mesh) -> State:
    """The shapes and the bytes of the parameters and of the optimizer's state.

    Raises:
        ConfigError: The mesh does not divide an axis of the model.
    """
    training = workload.training
    assert training is not None
    precision = training.trainer.precision
    optimizer = training.optimizer.build(training.trainer.num_train_steps)
    structs, shardings = state_structs(
        lambda key: split_trained(init_trained(workload)(key))[0], optimizer, mesh, precision
    )
    trained, checkpoint = _bytes(structs.model), busiest_bytes(jax.tree.leaves(structs))
    if training.lora is not None:
        base = model_structs(workload, mesh)
        structs = structs.join(LoraModel(base=base, adapters=None, scale=training.lora.scale))
    parameters = _bytes(structs.model)
    reference = parameters * precision.compute.itemsize // precision.param.itemsize if training.reference else 0
    return State(
        structs=structs,
        shardings=shardings,
        parameters=parameters,
        trained=trained,
        optimizer=_bytes(structs.opt_state),
        reference=reference,
        checkpoint=checkpoint,
    )


def model_structs(workload: Workload, mesh: Mesh) -> LlamaLMHeadModel:
    """A model that is not trained, as shapes on a mesh.

    Args:
        workload: What is asked of the devices; its model is used.

    Returns:
        The model with a `jax.ShapeDtypeStruct` for each weight.

    Raises:
        ConfigError: The mesh does not divide an axis of a weight.
    """
    shapes = skeleton(workload.vocab_size, workload.model)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, jax.numpy.dtype(workload.dtype), sharding=sharding),
        shapes,
        parameter_shardings(shapes, mesh),
    )


def init_trained(workload: Workload) -> Callable[[jax.Array], LlamaLMHeadModel | LoraModel]:
    """Return what makes the model that is trained, from a key."""
    lora = None if workload.training is None else workload.training.lora

    def init(key: jax.Array) -> LlamaLMHeadModel | LoraModel:
        base = LlamaLMHeadModel.init(hax.Axis("vocab", workload.vocab_size), workload.model, key=key)
        if lora is None:
            return base
        return LoraModel(base=base, adapters=lora.init(workload.model, key), scale=lora.scale)

    return init


def _bytes(tree: Any) -> int:
    return sum(block_bytes(leaf) for leaf in jax.tree.leaves(tree))
