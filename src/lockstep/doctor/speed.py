"""The speed of devices: memory and matrix products on all at the same time, and collectives by size and by members."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from lockstep.doctor.finding import Finding
from lockstep.engine import count_memories
from lockstep.hosts import Hosts, Watchdog, environment, name_processes
from lockstep.placement import place
from lockstep.placement.device import Chip, Link, Program, chip_of, compile_program, hops, published_chip, slice_index
from lockstep.printable import bytes_text, seconds_text

REPEATS: Final = 3  # times that each number of turns is launched; the fastest counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A program that does the same some number of times, and another that makes its arguments."""

    name: str
    fill: Program  # the program that makes the arguments, without arguments of its own
    run: Program  # the program that takes them and a number of turns, and returns what has their result in it
    turns: tuple[int, int]  # few and many: the difference of their seconds has no cost of a launch


def time_loops(hosts: Hosts, name: str, build: Callable[[], Sequence[Loop]]) -> list[list[float]]:
    """Time some loops; every process makes the same call. For each process, the seconds of one turn of each loop."""
    watchdog = Watchdog(hosts, hosts.timeout_s)
    with hosts.scope(f"doctor/{name}") as scope:
        with scope.run_on_all("compile") as compiled:
            compiled.agree(environment())
            loops = build()
            for loop in loops:
                compiled.agree({**loop.fill.digests, **loop.run.digests})
        with scope.launch_on_all("measure") as measured, watchdog.watch(name):
            measured.share([_time(loop) for loop in loops])
    return measured.shared


def _time(loop: Loop) -> float:
    """Seconds of one turn on this process."""
    arguments = jax.block_until_ready(loop.fill())
    few, most = loop.turns
    _launch(loop, arguments, few)  # the first launch of a program does more
    fastest = {turns: min(_launch(loop, arguments, turns) for _ in range(REPEATS)) for turns in loop.turns}
    slope = (fastest[most] - fastest[few]) / (most - few)
    # Where the turns are lost in the noise of the launch, they take less than the launch together with them.
    return slope if slope > 0 else fastest[most] / most


def _launch(loop: Loop, arguments: Any, turns: int) -> float:
    (leaf, *_) = jax.tree.leaves(arguments)
    count = place(np.array(turns, np.int32), NamedSharding(leaf.sharding.mesh, PartitionSpec()))
    begin = time.perf_counter()
    jax.block_until_ready(loop.run(arguments, count))
    return time.perf_counter() - begin


LOW: Final = 0.7
"""Share of the published number below which there is a warning: a matrix product reaches some 0.8 of it."""
SLOW_HOST: Final = 0.85  # share of the median host's speed below which a host is named


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the measured matrices."""

    dtype: Any
    read: int  # the side of the square matrix that is read from memory in each turn
    rows: int  # number of vectors that it is multiplied with
    product: int  # the side of the square matrices that are multiplied
    read_turns: tuple[int, int]  # the smaller and the larger number of turns of reading
    product_turns: tuple[int, int]  # those of multiplying


_CPU: Final = Sizes(dtype=jnp.float32, read=4096, rows=1, product=512, read_turns=(1, 7), product_turns=(1, 9))
_CHIP: Final = Sizes(
    dtype=jnp.bfloat16, read=16384, rows=8, product=8192, read_turns=(4, 68), product_turns=(2, 22)
)  # half a GiB, which is in no cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """The speeds of the devices of one process."""

    bandwidth: float  # bytes per second that a memory gives to the cores at it
    flops: float  # the floating-point operations per second of matrix products of the cores at one memory


def sizes_for(platform: str) -> Sizes:
    """The sizes for a platform."""
    return _CPU if platform == "cpu" else _CHIP


def build_loops(hosts: Hosts, devices: Sequence[jax.Device], sizes: Sizes) -> list[Loop]:
    """Compile the two loops; nothing is exchanged between devices in them."""
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("device"))
    number = mesh.size

    def loop(name: str, side: int, columns: int, turns: tuple[int, int]) -> Loop:
        shapes = ((number, side, side), (number, side, columns))

        def fill() -> Any:
            # Ones on both sides stay ones when a product is divided by the side.
            return tuple(jnp.ones(shape, sizes.dtype) for shape in shapes)

        def multiply(matrix: jax.Array, x: jax.Array, count: jax.Array) -> jax.Array:
            def turn(_: Any, x: jax.Array) -> jax.Array:
                return (jnp.matmul(matrix[0], x[0], preferred_element_type=sizes.dtype) / side)[None]

            return jax.lax.fori_loop(0, count, turn, x)

        def run(arguments: Any, count: jax.Array) -> jax.Array:
            inner: Any = jax.shard_map(
                multiply, mesh=mesh, in_specs=(P("device"), P("device"), P()), out_specs=P("device")
            )
            return inner(*arguments, count)

        structs = tuple(jax.ShapeDtypeStruct(shape, sizes.dtype, sharding=split) for shape in shapes)
        count = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))
        common: dict[str, Any] = {"mesh": mesh, "ledger": hosts.ledger}
        return Loop(
            name=name,
            fill=compile_program(f"doctor_{name}_fill", fill, [], out_shardings=(split, split), **common),
            run=compile_program(f"doctor_{name}", run, [structs, count], **common),
            turns=turns,
        )

    return [
        loop("read", sizes.read, sizes.rows, sizes.read_turns),
        loop("multiply", sizes.product, sizes.product, sizes.product_turns),
    ]


def speeds(seconds: Sequence[Sequence[float]], devices: Sequence[jax.Device], sizes: Sizes) -> list[DeviceSpeed]:
    """The speeds of each process.

    Args:
        seconds: The seconds of a turn of each of the two loops, by process.
        devices: All devices; several of them may share a memory and its cores (CPU).
    """
    sharing = len(devices) / count_memories(devices)
    read_bytes = sharing * sizes.read**2 * jnp.dtype(sizes.dtype).itemsize
    operations = sharing * 2 * sizes.product**3
    return [DeviceSpeed(bandwidth=read_bytes / read, flops=operations / product) for read, product in seconds]


def judge_speeds(speeds: Sequence[DeviceSpeed], devices: Sequence[jax.Device]) -> list[Finding]:
    """Compare what was measured with what is published, and hosts that share no memory with each other."""
    device, apart = devices[0], count_memories(devices) >= len(speeds)
    chip = published_chip(device)
    findings = []
    for name, label in (("bandwidth", "memory bandwidth"), ("flops", "matrix products")):
        values = [getattr(speed, name) for speed in speeds]
        middle, least = sorted(values)[len(values) // 2], min(values)
        unit, scale = ("GB/s", 1e9) if name == "bandwidth" else ("GFLOP/s", 1e9)
        if name == "flops" and least >= 1e12:
            unit, scale = "TFLOP/s", 1e12
        text = f"{least / scale:.4g} {unit} per device" if device.platform != "cpu" else f"{least / scale:.4g} {unit}"
        slow = [process for process, value in enumerate(values) if apart and value < SLOW_HOST * middle]
        if chip is not None:
            text += f", {least / getattr(chip, name):.0%} of the {getattr(chip, name) / scale:.4g} published"
        if slow:
            text += f"; the median of all hosts is {middle / scale:.4g}, and {name_processes(slow)} slower."
            fix = "Look there for another process, for heat, or replace the machine: all others wait for it."
            findings.append(Finding.warning(label, text, fix))
        elif chip is not None and least < LOW * getattr(chip, name):
            fix = "End other processes that use the devices; if it stays, --calibrate lets plan know."
            findings.append(Finding.warning(label, f"{text}.", fix))
        else:
            findings.append(Finding.ok(label, text))
    return findings


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
        peers = self.group.members - 1
        return 2 * peers / self.group.members * self.size if self.kind == "all-reduce" else float(peers * self.size)

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
    """The groups to measure: each axis of a training mesh, the devices of a host, and one device of each host."""
    candidates = {
        name: np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[name])
        for axis, name in enumerate(mesh.axis_names)
    }
    devices = list(mesh.devices.flat)
    processes = sorted({device.process_index for device in devices})
    by_host = [[device for device in devices if device.process_index == process] for process in processes]
    candidates["all devices"] = np.array([devices])
    if len({len(members) for members in by_host}) == 1:
        candidates["the devices of a host"] = np.array(by_host)
        candidates["one device of each host"] = np.array(by_host).T
    groups: dict[frozenset[frozenset[jax.Device]], Group] = {}
    for name, rows in candidates.items():
        division = frozenset(frozenset(row) for row in rows)
        if rows.shape[1] > 1 and division not in groups:
            axes = Mesh(rows, ("group", "member"), axis_types=(AxisType.Auto,) * 2)
            groups[division] = Group(name=name, mesh=axes)
    return list(groups.values())


def collective_sizes(platform: str) -> tuple[int, ...]:
    """The bytes that each device gives, for a platform: what a decoded token, a layer's activations and a layer's
    weights take.
    """
    return (4 << 10, 64 << 10, 1 << 20) if platform == "cpu" else (4 << 10, 1 << 20, 64 << 20)


def build_collectives(hosts: Hosts, specs: Sequence[tuple[Group, Kind, int]]) -> list[Loop]:
    """Compile a loop for each collective."""
    return [_loop(hosts, *spec) for spec in specs]


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
    findings = []
    for group in dict.fromkeys(sample.group.name for sample in measured):
        reduces = [sample for sample in measured if sample.group.name == group and sample.kind == "all-reduce"]
        first = reduces[0].group
        where = f"of several {'slices' if first.slices > 1 else 'hosts'}" if first.crosses_hosts else "of one host"
        name = f"all-reduce over {group}"
        text = f"{first.members} devices {where}: " + ", ".join(
            f"{bytes_text(sample.size).replace('.00', '')} {seconds_text(sample.seconds)}" for sample in reduces
        )
        if first.slices == first.members:
            text += f", {reduces[-1].rate_per_host / 1e9:.3g} GB/s per host"
        device = first.mesh.devices.flat[0]
        slow = [sample for sample in reduces if sample.seconds > SLOW * sample.predicted(chip_of(device))]
        if published_chip(device) is not None and slow:
            worst = max(slow, key=lambda sample: sample.seconds / sample.predicted(chip_of(device)))
            expected = seconds_text(worst.predicted(chip_of(device)))
            text += f"; by published numbers {bytes_text(worst.size)} take {expected}."
            fix = "Look for another process on these hosts or for a broken link; --calibrate lets plan know."
            findings.append(Finding.warning(name, text, fix))
        else:
            findings.append(Finding.ok(name, text))
    return findings
