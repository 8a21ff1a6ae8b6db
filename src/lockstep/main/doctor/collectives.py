"""The time of collectives, by size and by the devices that take part."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.hosts import Hosts
from lockstep.main.doctor.device_speed import Loop
from lockstep.main.doctor.finding import Finding
from lockstep.placement.device import Chip, Link, chip_of, compile_program, hops, published_chip, slice_index
from lockstep.printable import bytes_text, seconds_text

Kind = Literal["all-reduce", "all-gather"]

SLOW: Final = 3.0  # times the prediction from published numbers above which a collective is a warning
_BYTES: Final = P(("group", "member"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that exchange with each other, and how all devices are divided into such groups."""

    name: str  # the axis, or what the groups are
    mesh: Mesh  # all devices with the axes `group` and `member`

    @property
    def members(self) -> int:
        """The devices of a group."""
        return self.mesh.shape["member"]

    @property
    def crosses_hosts(self) -> bool:
        """Whether a group has devices of several hosts."""
        return any(len({device.process_index for device in row}) > 1 for row in self.mesh.devices)

    @property
    def slices(self) -> int:
        """The slices that a group has devices of."""
        return max(len(set(map(slice_index, row))) for row in self.mesh.devices)

    @property
    def hops(self) -> int:
        """The hops across the widest group."""
        return max(hops(list(row)) for row in self.mesh.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """The time of a collective."""

    group: Group
    kind: Kind
    size: int  # bytes that each device gives
    seconds: float

    @property
    def received(self) -> float:
        """The bytes that each device receives at least."""
        others = self.group.members - 1
        return 2 * others / self.group.members * self.size if self.kind == "all-reduce" else float(others * self.size)

    @property
    def turns(self) -> int:
        """The factor on the hops across the group that a byte travels: to all devices, for an all-reduce and back."""
        return (2 if self.kind == "all-reduce" else 1) * self.group.hops

    @property
    def between_slices(self) -> float:
        """The part of ``received`` that comes from other slices at least, where each slice first exchanges inside."""
        slices = self.group.slices
        if self.kind == "all-gather":
            return float((slices - 1) * self.size)
        return 2 * (slices - 1) / slices * self.size * slices / self.group.members

    @property
    def rate_per_host(self) -> float:
        """The bytes per second that the devices of a host receive together."""
        devices = [device.process_index for device in self.group.mesh.devices.flat]
        return self.received / self.seconds * devices.count(devices[0])

    def link(self, chip: Chip) -> Link:
        """The interconnect that it goes over, inside a slice."""
        return chip.network if self.group.crosses_hosts else chip.link

    def predicted(self, chip: Chip) -> float:
        """The seconds by the numbers of a chip; infinite between slices of a chip whose network nobody publishes."""
        link = self.link(chip)
        fixed = link.latency_s + self.turns * link.hop_s
        if self.group.slices == 1:
            return fixed + self.received / link.bandwidth
        if chip.dcn is None:
            return math.inf
        return fixed + (self.received - self.between_slices) / link.bandwidth + self.between_slices / chip.dcn


def find_groups(mesh: Mesh) -> list[Group]:
    """The groups to measure: each axis of a training mesh, the devices of a host, and one device of each host.

    Args:
        mesh: The training mesh, with the devices of a host next to each other.

    Returns:
        The groups of more than one device, each division of the devices once, under its first name.
    """
    candidates = {
        name: np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[name])
        for axis, name in enumerate(mesh.axis_names)
    }
    devices = list(mesh.devices.flat)
    processes = sorted({device.process_index for device in devices})
    by_host = [[device for device in devices if device.process_index == process] for process in processes]
    candidates["all devices"] = np.array([devices])
    if len({len(one) for one in by_host}) == 1:
        candidates["the devices of a host"] = np.array(by_host)
        candidates["one device of each host"] = np.array(by_host).T
    groups: dict[frozenset[frozenset[jax.Device]], Group] = {}
    for name, rows in candidates.items():
        division = frozenset(frozenset(row) for row in rows)
        if rows.shape[1] > 1 and division not in groups:
            axes = Mesh(rows, ("group", "member"), axis_types=(AxisType.Auto,) * 2)
            groups[division] = Group(name=name, mesh=axes)
    return list(groups.values())


def sizes_for(platform: str) -> tuple[int, ...]:
    """The bytes that each device gives, for a platform: what a decoded token, a layer's activations and a layer's
    weights take.
    """
    return (4 << 10, 64 << 10, 1 << 20) if platform == "cpu" else (4 << 10, 1 << 20, 64 << 20)


def build_loops(hosts: Hosts, wanted: Sequence[tuple[Group, Kind, int]]) -> list[Loop]:
    """Compile a loop for each collective.

    Args:
        wanted: The devices, the kind, and the bytes that each device gives.
    """
    return [_loop(hosts, *one) for one in wanted]


def _loop(hosts: Hosts, group: Group, kind: Kind, size: int) -> Loop:
    elements, mesh = size // 4, group.mesh
    split = NamedSharding(mesh, _BYTES)
    shape = (mesh.size * elements,)

    def reduce(x: jax.Array, _: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "member") / group.members

    def gather(x: jax.Array, count: jax.Array) -> jax.Array:
        # Which part goes on is known to no compiler, or it would gather less.
        everything = jax.lax.all_gather(x, "member", tiled=True)
        return jax.lax.dynamic_slice_in_dim(everything, count % group.members * elements, elements)

    exchange = reduce if kind == "all-reduce" else gather

    def turns(x: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: exchange(x, count), x)

    def run(x: jax.Array, count: jax.Array) -> jax.Array:
        # What each member has after an exchange is its own to the type checker of shard_map.
        inner = jax.shard_map(turns, mesh=mesh, in_specs=(_BYTES, P()), out_specs=_BYTES, check_vma=False)
        return inner(x, count)

    name = f"doctor_{kind.replace('-', '_')}_{'_'.join(group.name.split())}_{size}"
    struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=split)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))
    common: dict[str, Any] = {"mesh": mesh, "ledger": hosts.ledger}
    return Loop(
        name=name,
        fill=compile_program(f"{name}_fill", lambda: jnp.ones(shape, jnp.float32), [], out_shardings=split, **common),
        run=compile_program(name, run, [struct, count], **common),
        turns=(1, 9) if mesh.devices.flat[0].platform == "cpu" else (8, 72),
    )


def judge_collectives(measured: Sequence[CollectiveTime]) -> list[Finding]:
    """Say how long all-reduces take, by group and size."""
    found = []
    for group in dict.fromkeys(one.group.name for one in measured):
        ours = [one for one in measured if one.group.name == group and one.kind == "all-reduce"]
        first = ours[0].group
        where = f"of several {'slices' if first.slices > 1 else 'hosts'}" if first.crosses_hosts else "of one host"
        name = f"all-reduce over {group}"
        text = f"{first.members} devices {where}: " + ", ".join(
            f"{bytes_text(one.size).replace('.00', '')} {seconds_text(one.seconds)}" for one in ours
        )
        if first.slices == first.members:
            text += f", {ours[-1].rate_per_host / 1e9:.3g} GB/s per host"
        device = first.mesh.devices.flat[0]
        slow = [one for one in ours if one.seconds > SLOW * one.predicted(chip_of(device))]
        if published_chip(device) is not None and slow:
            worst = max(slow, key=lambda one: one.seconds / one.predicted(chip_of(device)))
            expected = seconds_text(worst.predicted(chip_of(device)))
            text += f"; by published numbers {bytes_text(worst.size)} take {expected}."
            fix = "Look for another process on these hosts or for a broken link; --calibrate lets plan know."
            found.append(Finding.warning(name, text, fix))
        else:
            found.append(Finding.ok(name, text))
    return found
