"""Rematerialisation policies by name: what the backward pass keeps of each layer, and what it computes again."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Literal

import equinox as eqx
import jax
from haliax import ScanCheckpointPolicy

type RematPolicy = bool | Literal["nothing", "full", "dots", "offload"]

POLICIES: Final = ("nothing", "dots", "full", "offload")
"""The names of the policies, from most to least device memory."""


@dataclasses.dataclass(frozen=True)
class _DotsPolicy(ScanCheckpointPolicy):
    """Keeps the results of products with weights, as MaxText's ``minimal``: attention and what is between is redone."""

    def checkpoint(self, carry_name: str, input_name: str, callable: Callable[..., Any]) -> Callable[..., Any]:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return eqx.filter_checkpoint(callable, policy=policy, prevent_cse=False)


def name_of_policy(policy: RematPolicy) -> str:
    """Return the name of a policy.

    Args:
        policy: The name, or true for ``full`` and false for ``nothing``.
    """
    if isinstance(policy, bool):
        return "full" if policy else "nothing"
    return policy


def scan_policy(policy: RematPolicy) -> ScanCheckpointPolicy:
    """Return a policy as haliax takes it for stacked layers.

    Args:
        policy: ``nothing`` is computed twice; ``full``: each layer is, from its input; ``dots``: all but its products
            with weights; ``offload``: as ``full``, with the inputs of layers in the memory of the host.
    """
    match name_of_policy(policy):
        case "nothing":
            return ScanCheckpointPolicy.from_bool_or_str(False)
        case "dots":
            return _DotsPolicy()
        case "offload":
            return ScanCheckpointPolicy(save_carries="offload", save_inputs=False, save_block_internals=False)
        case _:
            return ScanCheckpointPolicy.from_bool_or_str(True)


def recomputes_layers(policy: RematPolicy) -> bool:
    """Return whether the backward pass computes the products of each layer a second time."""
    return name_of_policy(policy) in ("full", "offload")


def recomputes_attention(policy: RematPolicy) -> bool:
    """Return whether the backward pass computes the products of queries with keys and values a second time."""
    return name_of_policy(policy) != "nothing"
