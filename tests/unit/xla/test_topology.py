"""Slices by name: grids and hosts as the TPU compiler has them."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.slices import FAMILIES
from lockstep.xla import names_of, topology
from lockstep.xla.topology import COMPILERS, known_names

HOSTS = {
    "v4-8": (4, 1), "v4-32": (16, 4), "v5p-8": (4, 1), "v5p-16": (8, 2), "v5p-64": (32, 8), "v5p-512": (256, 64),
    "v5litepod-1": (1, 1), "v5litepod-8": (8, 1), "v5litepod-16": (16, 4), "v6e-8": (8, 1), "v6e-16": (16, 4),
    "v6e-256": (256, 64), "tpu7x-8": (8, 1), "tpu7x-128": (128, 16),
}  # fmt: skip

SCRIPT = """
import json
from lockstep.xla.topology import known_names, topology
found = {name: topology(name) for name in known_names()}
print(json.dumps({name: [len(t.devices), t.hosts, len({d.process_index for d in t.on_host()}), len(t.on_host())]
                  for name, t in found.items()}))
"""


def test_names_follow_from_the_grids():
    names = known_names()
    assert len(names) == sum(len(family.grids) for family in FAMILIES if family.prefix in COMPILERS)
    assert names["v5p-64"].grid == (2, 4, 4) and names["v6e-16"].grid == (4, 4)
    assert names_of("v5litepod") == [f"v5litepod-{n}" for n in (1, 4, 8, 16, 32, 64, 128, 256)]


@pytest.mark.parametrize("name", ["v5p-63", "v7x-8", "", "v5p"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(
        ConfigError, match=r"is not known\. Known: v4-8, .*v5p-64.*v5litepod-16.*v6e-256; .*tpu7x-128.*\."
    ):
        topology(name)


@pytest.mark.parametrize("name", ["tpu8t-16", "2xtpu8i-8", "8t"])
def test_a_generation_without_a_compiler_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"topology '{name}' cannot be planned: no TPU compiler .* knows TPU 8[ti], "):
        topology(name)


@pytest.mark.nightly  # in make slow: tests/tpu_compile
def test_every_slice_is_known_to_the_compiler():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")
    environment = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    for name, (devices, hosts) in HOSTS.items():
        assert found[name][:2] == [devices, hosts], name
    # What the launcher works out without a compiler is what the compiler says.
    assert {name: each[:2] for name, each in found.items()} == {
        n: [s.chips * s.family.devices_per_chip, s.hosts] for n, s in known_names().items()
    }
    # Every host has as many devices, though their ids need not be consecutive.
    assert all(devices == hosts * mine and of_one == 1 for devices, hosts, of_one, mine in found.values())


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    topology.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'jax-lockstep\[plan\]'; no TPU is needed"):
        topology("v5p-64")
