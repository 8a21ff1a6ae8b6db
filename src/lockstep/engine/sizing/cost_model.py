"""Seconds that decoding should take at best: the numbers by which ``layout: auto`` compares layouts."""

import dataclasses

import numpy as np

from lockstep.device import Chip, Link
from lockstep.engine.sizing.demand import Demand
from lockstep.engine.sizing.fit import waves
from lockstep.engine.sizing.memory_model import OUTER, Shapes
from lockstep.hosts import on_one_machine
from lockstep.placement.decode_mesh import DecodeMesh
from lockstep.schedule import Capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted seconds; a lower bound that is good for comparing, not for promising.

    Args:
        reshard_s: of moving the weights, once per round.
        memory_s: per step, of reading weights and K/V.
        compute_s: per step, of the matrix products; hidden behind ``memory_s`` or the other way round.
        collectives_s: per step.
        steps: decode steps until all requests are answered.
        active: sequences that decode at a time.
    """

    reshard_s: float
    memory_s: float
    compute_s: float
    collectives_s: float
    steps: float
    active: float

    @property
    def step_s(self) -> float:
        """Of one decode step."""
        return max(self.memory_s, self.compute_s) + self.collectives_s

    @property
    def total_s(self) -> float:
        """Of answering all requests, prefill left out: it is the same work in every layout."""
        return self.reshard_s + self.steps * self.step_s


def estimate(shapes: Shapes, sizes: Capacity, demand: Demand, chip: Chip) -> Estimate:
    """Predicts a round.

    Args:
        shapes: of the model in a layout.
        sizes: that fit.
        demand: of the requests.
        chip: what a device can do.
    """
    decode_mesh, config, item = shapes.decode_mesh, shapes.config, shapes.dtype.itemsize
    turns = waves(sizes, demand)
    active = demand.sequences / turns
    working = len(sizes.active_replicas)
    slots = active / working
    read = sum(shapes.decode_bytes(leaf, layout) for _, leaf, layout in shapes.leaves)
    if shapes.weights.lm_head is not None:  # of an embedding that is not the output layer too, rows are read
        read -= sum(shapes.decode_bytes(leaf, layout) for name, leaf, layout in shapes.leaves if name == "embed")
    kv = slots * demand.context * shapes.kv_bytes
    # Devices that share cores and a memory: all of them, and those that decode.
    share = decode_mesh.mesh.size // memories(decode_mesh)
    decoding = share * working / decode_mesh.replicas if share > 1 else 1

    link = _link(decode_mesh, chip, decode_mesh.tensor)
    moved = max(1.0, slots) * config.hidden_dim * item
    reductions = (
        2 * config.num_layers + 3 if decode_mesh.tensor > 1 else 0
    )  # two per layer, embedding, two for the sample
    collectives = reductions * (
        link.latency_s + 2 * (decode_mesh.tensor - 1) / decode_mesh.tensor * moved / link.bandwidth
    )
    whole, far = (
        decode_mesh.replicas * decode_mesh.tensor,
        _link(decode_mesh, chip, decode_mesh.replicas * decode_mesh.tensor),
    )
    written = 0
    if shapes.gathered:
        size = sum(shapes.gathered.values())
        written = 2 * size  # what is gathered is written, and read once more
        count = sum(1 if name in OUTER else config.num_layers for name in shapes.gathered)
        collectives += count * far.latency_s + size * (whole - 1) / whole / far.bandwidth
    reshard = 0.0
    if shapes.moves:
        reshard = len(shapes.leaves) * config.num_layers * far.latency_s
        reshard += shapes.copied * (whole - 1) / whole / far.bandwidth + 2 * shapes.copied * share / chip.bandwidth
    elif shapes.copied:
        reshard = 3 * shapes.copied * share / chip.bandwidth
    return Estimate(
        reshard_s=reshard,
        memory_s=(read + kv + written) * decoding / chip.bandwidth,
        compute_s=2 * read / item * max(1.0, slots) * decoding / chip.flops,
        collectives_s=collectives,
        steps=turns * demand.new_tokens,
        active=active,
    )


def one_per_memory(decode_mesh: DecodeMesh) -> int:
    """How many replicas should work where devices share a memory: more would only read the weights again.

    Args:
        decode_mesh: with a replica on every device.

    Returns:
        The number of memories, if a replica of each is then among the working ones, and others can rest; else 0.
    """
    found, devices = memories(decode_mesh), decode_mesh.mesh.size
    owners = [device.process_index for device in decode_mesh.mesh.devices.flat]
    if found == devices or devices % found or len(set(owners[:: devices // found])) != found:
        return 0
    return found


def memories(decode_mesh: DecodeMesh) -> int:
    """How many memories, with the cores at them, the devices of a decode mesh have.

    One each; but on CPU one for each process, and a single one where all processes are known to run on one machine.
    """
    devices = list(decode_mesh.mesh.devices.flat)
    if devices[0].platform != "cpu":
        return len(devices)
    return 1 if on_one_machine() else len({device.process_index for device in devices})


def _link(decode_mesh: DecodeMesh, chip: Chip, group: int) -> Link:
    """The slowest way inside groups of so many consecutive devices."""
    hosts = np.array([device.process_index for device in decode_mesh.mesh.devices.flat]).reshape(-1, group)
    return chip.link if (hosts == hosts[:, :1]).all() else chip.network
