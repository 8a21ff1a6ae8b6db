"""The speed at which a device reads its memory and multiplies matrices, measured on all devices at the same time."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from lockstep.engine import count_memories
from lockstep.hosts import Hosts, Watchdog, environment, name_processes
from lockstep.main.doctor.finding import Finding
from lockstep.placement import place
from lockstep.placement.device import Program, compile_program, published_chip

REPEATS: Final = 3  # times that each number of turns is launched; the fastest counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A program that does the same some number of times, and another that makes its arguments."""

    name: str
    fill: Program  # the program that makes the arguments, without arguments of its own
    run: Program  # the program that takes them and a number of turns, and returns what has their result in it
    turns: tuple[int, int]  # few and many: the difference of their seconds has no cost of a launch


def time_loops(hosts: Hosts, name: str, build: Callable[[], Sequence[Loop]]) -> list[list[float]]:
    """Time some loops; every process makes the same call.

    Args:
        build: Compiles the loops; launches nothing.

    Returns:
        For each process, the seconds of one turn of each loop.

    Raises:
        PeerError: A loop does not compile or run on some host.
        DisagreementError: The hosts compiled different programs.
        LaunchMismatchError: The hosts launched different programs.
    """
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
    few, many = loop.turns
    _launch(loop, arguments, few)  # the first launch of a program does more
    fastest = {turns: min(_launch(loop, arguments, turns) for _ in range(REPEATS)) for turns in loop.turns}
    slope = (fastest[many] - fastest[few]) / (many - few)
    # Where the turns are lost in the noise of the launch, they take less than the launch together with them.
    return slope if slope > 0 else fastest[many] / many


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


def judge_speeds(found: Sequence[DeviceSpeed], devices: Sequence[jax.Device]) -> list[Finding]:
    """Compare what was measured with what is published, and the hosts with each other.

    Args:
        devices: All devices. Processes whose devices share a memory get what the others leave, and are not compared.
    """
    device, apart = devices[0], count_memories(devices) >= len(found)
    chip = published_chip(device)
    findings = []
    for name in ("bandwidth", "flops"):
        values = [getattr(one, name) for one in found]
        what = {"bandwidth": "memory bandwidth", "flops": "matrix products"}[name]
        middle, least = sorted(values)[len(values) // 2], min(values)
        unit, scale = _unit(name, least)
        text = f"{least / scale:.4g} {unit} per device" if device.platform != "cpu" else f"{least / scale:.4g} {unit}"
        slow = [process for process, value in enumerate(values) if apart and value < SLOW_HOST * middle]
        if chip is not None:
            text += f", {least / getattr(chip, name):.0%} of the {getattr(chip, name) / scale:.4g} published"
        if slow:
            text += f"; the median of all hosts is {middle / scale:.4g}, and {name_processes(slow)} slower."
            fix = "Look there for another process, for heat, or replace the machine: all others wait for it."
            findings.append(Finding.warning(what, text, fix))
        elif chip is not None and least < LOW * getattr(chip, name):
            fix = "End other processes that use the devices; if it stays, --calibrate lets plan know."
            findings.append(Finding.warning(what, f"{text}.", fix))
        else:
            findings.append(Finding.ok(what, text))
    return findings


def _unit(name: str, value: float) -> tuple[str, float]:
    """The unit in which a number is shown, and how much it is."""
    if name == "bandwidth":
        return "GB/s", 1e9
    return ("TFLOP/s", 1e12) if value >= 1e12 else ("GFLOP/s", 1e9)
