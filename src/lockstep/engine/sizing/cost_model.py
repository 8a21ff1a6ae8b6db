"""Seconds that decoding should take at best: the numbers by which ``layout: auto`` compares layouts."""

import dataclasses
import math

import jax

from lockstep.engine.decode_model import DecodeModel
from lockstep.engine.idle_replicas import count_memories
from lockstep.engine.schedule import Capacity
from lockstep.engine.sizing.demand import Demand
from lockstep.engine.sizing.memory_model import concurrent_sequences
from lockstep.placement import DCN, PP, DecodeMesh
from lockstep.placement.device import Chip, Link, hops, on_one_chip, slice_index, tile_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted seconds; a lower bound that is good for comparing, not for promising."""

    reshard_s: float  # seconds to move the weights, once per round
    memory_s: float  # seconds per step to read weights and K/V
    compute_s: float  # seconds per step of the matrix products; hidden behind `memory_s` or the other way round
    collectives_s: float  # seconds per step of the collectives
    steps: float  # decode steps until all requests are answered
    active: float  # sequences that decode at a time
    moved_s: float = 0.0  # seconds per step of `collectives_s` that grow with the positions of the step
    reread_s: float = 0.0  # seconds per step of `memory_s` in which exact numerics read weights again, for each tile

    @property
    def step_s(self) -> float:
        """Seconds of one decode step."""
        return max(self.memory_s, self.compute_s) + self.collectives_s

    @property
    def total_s(self) -> float:
        """Seconds to answer all requests, prefill left out: it is the same work in every layout."""
        return self.reshard_s + self.steps * self.step_s

    def verify_cost(self, width: int) -> float:
        """Return the time of a step that verifies ``width`` positions of each sequence, in decode steps.

        Weights and K/V are read once, whatever the number of positions. Reading and computing count one after the
        other, which is the worst case: it promises no more than there is to gain.
        """
        fixed_s = self.memory_s + self.collectives_s - self.moved_s
        growing_s = self.compute_s + self.moved_s
        return (fixed_s + width * growing_s) / (fixed_s + growing_s)


def used_weights(model: DecodeModel, slots: float) -> tuple[float, float]:
    """The bytes of weights that a device reads in a step of so many sequences, and the numbers it multiplies each with.

    Those of the busiest device of a replica, which sets the pace; on CPU, where all share memory and cores, the mean.
    """
    uneven = (1.0, 1.0)
    if model.whole_experts and model.device.platform != "cpu" and model.config.experts is not None:
        uneven = model.config.experts.unevenness(max(1.0, slots), model.decode_mesh.tensor)
    read = multiplied = 0.0
    for weight in model.leaves:
        more = uneven if weight.name.startswith("expert_") else (1.0, 1.0)
        read += more[0] * model.config.part_read(weight.name, slots) * weight.decode_bytes
        multiplied += more[1] * model.config.part_read(weight.name, 1) * weight.decode_size
    return read, multiplied


def estimate(model: DecodeModel, sizes: Capacity, demand: Demand, chip: Chip) -> Estimate:
    """Predict a round."""
    config, item, decode_mesh = model.config, model.dtype.itemsize, model.decode_mesh
    tensor, devices, layers = decode_mesh.tensor, decode_mesh.mesh.size, config.num_layers
    batches = max(1.0, demand.sequences / concurrent_sequences(sizes, demand))
    active = demand.sequences / batches
    slots = active / len(sizes.active_replicas)
    read, parameters = used_weights(model, slots)
    rows = max(1, math.ceil(slots))
    tiles = math.ceil(rows / tile_of(rows, model.dtype, model.device.platform)) if config.exact else 1
    moved_by_layer = [layer.step_bytes(demand.context, model.kv_dtype) for layer in model.kept]
    kv = slots * sum(moved_by_layer) / model.heads.context
    # Devices at one memory share its bandwidth and cores: all of them while weights move, the active ones in a step.
    sharing = devices // count_memories(list(decode_mesh.mesh.devices.flat))
    decoding = sharing * len(sizes.active_replicas) / decode_mesh.replicas if sharing > 1 else 1

    near, of_replica = _link(decode_mesh, chip, tensor)
    # Weights are gathered inside each slice.
    sharers = devices // len(set(map(slice_index, decode_mesh.mesh.devices.flat)))
    far, of_all = _link(decode_mesh, chip, sharers)
    collectives = reduced = 0.0
    if tensor > 1:
        # Two all-reduces in a layer and one for the embedding, and what two gathers tell of the sample.
        reductions, gathers = 2 * layers + 1, 2
        moved = max(1.0, slots) * config.hidden_dim * item
        collectives = reductions * near.reduce_s(of_replica) + gathers * near.gather_s(of_replica)
        reduced = (reductions + gathers) * 2 * (tensor - 1) / tensor * moved / near.bandwidth
        collectives += reduced
    if decode_mesh.context > 1:
        # Queries of 16 bits or so to all that split the positions, and what each found in float32 to their own.
        link, across = _link(decode_mesh, chip, decode_mesh.context)
        heads = model.heads.at_own_positions
        numbers = max(1.0, slots) * heads.kv_heads * heads.group * (heads.head_size * item + 4 * (heads.head_size + 1))
        sent = layers * numbers * (decode_mesh.context - 1) / decode_mesh.context / link.bandwidth
        collectives += 2 * layers * link.gather_s(across) + sent
        reduced += sent
    gathered = sum(weight.decode_bytes for weight in model.gathered)
    collectives += sum(weight.layers or 1 for weight in model.gathered) * far.gather_s(of_all)
    collectives += gathered * (sharers - 1) / sharers / far.bandwidth
    reshard = 0.0
    if model.moves:
        reshard = len(model.leaves) * layers * far.gather_s(of_all)
        reshard += model.copied_bytes * ((sharers - 1) / sharers / far.bandwidth + 2 * sharing / chip.bandwidth)
        reshard += from_other_slices(model) / (chip.dcn or chip.network.bandwidth)
    elif model.copied_bytes:
        reshard = 3 * model.copied_bytes * sharing / chip.bandwidth
    return Estimate(
        reshard_s=reshard,
        # What is gathered is written, and read once more.
        memory_s=(tiles * read + kv + 2 * gathered) * decoding / chip.bandwidth,
        compute_s=2 * parameters * max(1.0, slots) * decoding / chip.flops,
        collectives_s=collectives,
        steps=batches * demand.new_tokens,
        active=active,
        moved_s=reduced,
        reread_s=(tiles - 1) * read * decoding / chip.bandwidth,
    )


def from_other_slices(model: DecodeModel) -> int:
    """The bytes that a device receives over the network between slices while weights move: layers of their stages."""
    decode_mesh, received = model.decode_mesh, 0
    stages, copies = (decode_mesh.training_shape.get(axis, 1) for axis in (PP, DCN))
    slices = [slice_index(device) for device in decode_mesh.mesh.devices.reshape(copies, stages, -1)[0, :, 0]]
    leaves = zip(model.leaves, *map(jax.tree.leaves, (model.layouts, model.weights)), strict=True)
    for weight, layout, leaf in leaves:
        if weight.layers and layout.spec[0]:
            # Layers that are to have 8 bits are sent as the trainer has them: a scale is that of a whole channel.
            as_it_is = model.quantized_dtype is not None and not model.lazy
            block = leaf.sharding.shard_shape(leaf.shape) if as_it_is else ()
            received += math.prod(block) * leaf.dtype.itemsize if as_it_is else weight.training_bytes
    return received * sum(slice_ != slices[0] for slice_ in slices)


def verify_costs(sizes: Capacity, predicted: Estimate | None) -> dict[int, float]:
    """Return the time of a step that verifies drafts, in decode steps, by its width.

    Args:
        predicted: The prediction that the layout was chosen by; None where every step counts as one of decode.
    """
    return {width: 1.0 if predicted is None else predicted.verify_cost(width) for width in sizes.verify_widths}


def _link(decode_mesh: DecodeMesh, chip: Chip, group: int) -> tuple[Link, int]:
    """The slowest link inside groups of so many consecutive devices, and the hops across the widest of them."""
    groups = decode_mesh.mesh.devices.reshape(-1, group)
    if chip.core is not None and all(on_one_chip(list(group_devices)) for group_devices in groups):
        return chip.core, 0
    near = all(len({device.process_index for device in group_devices}) == 1 for group_devices in groups)
    return chip.link if near else chip.network, max(hops(list(group_devices)) for group_devices in groups)
