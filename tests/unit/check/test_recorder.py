import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.check import _jax
from lockstep.check.recorder import IN_FLIGHT, SAMPLES, Recorder


@pytest.fixture
def recorded(tmp_path):
    file = tmp_path / "process-0.jsonl"
    recorder = Recorder(file, 0)
    with _jax.watch_launches(recorder):
        yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
    recorder.end()


def step_on(devices):
    sharding = NamedSharding(Mesh(devices, "data"), PartitionSpec())
    step = jax.jit(lambda x: (x * 0.9, x.sum()), out_shardings=sharding, donate_argnums=0)
    return step, jax.device_put(jnp.ones(8), sharding)


@pytest.mark.parametrize(("devices", "waits"), [(2, 3), (1, 0)])
def test_launches_on_several_devices_are_held_back_and_may_donate(recorded, monkeypatch, devices, waits):
    waited = []
    monkeypatch.setattr(_jax, "wait_for", lambda results: waited.append(jax.block_until_ready(results)))
    step, x = step_on(jax.devices()[:devices])
    for _ in range(3 * IN_FLIGHT):
        x, _ = step(x)
    assert len(waited) == waits


def test_a_launch_that_fails_does_not_raise_where_it_is_waited_for():
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("out of memory")

    _jax.wait_for([Failed()])


def test_the_live_arrays_are_looked_at_at_each_of_the_first_steps_however_fast_they_are(recorded):
    step, x = step_on(jax.devices()[:2])
    kept = {}
    for number in range(40):
        x, kept[number] = step(x)
    launches = [line for line in recorded() if line["is"] == "launch"]
    stacks = [line["stack"] for line in launches]
    live = [line.get("live") for line in launches if stacks.count(line["stack"]) == 40]
    assert len(live) == 40 <= SAMPLES
    assert all(later > before for before, later in zip(live, live[1:], strict=False))
