"""Timing loops: the seconds of a turn without those of a launch, and hosts that launch the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import PeerError
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.doctor import bench
from lockstep.main.doctor.bench import Loop, time_loops
from lockstep.placement import make_mesh
from lockstep.placement.device import compile_program


def loops(hosts):
    mesh = make_mesh(devices=jax.devices()[:1])
    whole = NamedSharding(mesh, PartitionSpec())
    x, count = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in (((4,), "float32"), ((), "int32"))
    )

    def run(x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: x + 1, x)

    fill = compile_program("fill", lambda: jnp.zeros(4), [], mesh=mesh, ledger=hosts.ledger, out_shardings=whole)
    return [
        Loop(
            name="add",
            fill=fill,
            run=compile_program("add", run, [x, count], mesh=mesh, ledger=hosts.ledger),
            turns=(2, 6),
        )
    ]


def test_every_launch_is_in_the_ledger():
    hosts = Hosts(MemoryClient.hub(1)[0])
    time_loops(hosts, "adding", lambda: loops(hosts))
    assert hosts.ledger.launches == ["fill"] + ["add"] * (1 + 2 * bench.REPEATS)


@pytest.mark.parametrize(("few", "many", "turn"), [(0.5, 0.9, 0.1), (0.9, 0.6, 0.1)], ids=["slope", "noise"])
def test_a_turn_is_the_slope_and_never_less_than_nothing(few, many, turn, monkeypatch):
    monkeypatch.setattr(bench, "_launch", lambda loop, arguments, turns: {2: few, 6: many}[turns])
    hosts = Hosts(MemoryClient.hub(1)[0])
    ((seconds,),) = time_loops(hosts, "adding", lambda: loops(hosts))
    assert np.isclose(seconds, turn)


def test_a_loop_that_does_not_compile_fails_on_all():
    def build():
        raise ValueError("no such device")

    with pytest.raises(PeerError, match="doctor/adding#1/compile failed: ValueError: no such device"):
        time_loops(Hosts(MemoryClient.hub(1)[0]), "adding", build)
