"""Replicas that are given no sequences: when that is faster, how many they are, and what they leave out of a launch.

The devices of a CPU process share its cores and its memory, so that every replica that decodes reads the weights once
more through that memory (docs/adr/0009-idle-replicas.md). In the layout ``{tensor: 1, replicas: M}`` M replicas
decode; `Capacity.active_replicas` says which. Nothing inside a step of theirs waits for another replica.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from lockstep.engine.config import Layout
from lockstep.engine.schedule import Capacity
from lockstep.errors import ConfigError
from lockstep.hosts import on_one_machine


def count_memories(devices: Sequence[jax.Device]) -> int:
    """The number of memories, each with the cores at it, of some devices.

    As many as there are devices; but on CPU one for each process, and a single one where all processes are known to run
    on one machine.
    """
    if devices[0].platform != "cpu":
        return len(devices)
    return 1 if on_one_machine() else len({device.process_index for device in devices})


def layout_with_idle_replicas(devices: Sequence[jax.Device]) -> Layout | None:
    """The layout in which one replica for each memory decodes and the others are idle.

    Args:
        devices: All devices of a mesh, in its order.

    Returns:
        The layout, or None where each device has a memory of its own or where the active replicas, which are evenly
        spaced, would not be one for each memory.
    """
    memories = count_memories(devices)
    if memories == len(devices) or len(devices) % memories:
        return None
    owners = {device.process_index for device in devices[:: len(devices) // memories]}
    return {"tensor": 1, "replicas": memories} if len(owners) == memories else None


def count_active(layout: Layout, replicas: int) -> int:
    """The number of replicas that decode in a layout.

    Raises:
        ConfigError: The number of replicas that the layout asks for does not divide those of the mesh.
    """
    active = layout.get("replicas", replicas) if isinstance(layout, dict) else replicas
    if replicas % active:
        works = [size for size in range(1, replicas + 1) if replicas % size == 0]
        raise ConfigError(
            f"layout is {layout!r}; the mesh makes {replicas} replicas, which {active} does not divide. Set replicas "
            f"to one of {works}, or leave it out for all of them."
        )
    return active


def run_if_busy(capacity: Capacity, busy: Bool[Array, ""], fill: Callable[[Any], Any], pool: Any) -> Any:
    """``fill(pool)``, or the pool unchanged on an idle replica.

    A loop of at most one turn changes the pool in place, where a conditional would copy it.
    """
    if not capacity.idle_replicas:
        return fill(pool)
    _, pool = jax.lax.while_loop(lambda state: state[0], lambda state: (jnp.bool_(False), fill(state[1])), (busy, pool))
    return pool
