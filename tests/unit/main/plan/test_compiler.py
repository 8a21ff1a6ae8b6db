"""Slices by name: grids and hosts as the TPU compiler has them; compiled results on disk."""

import gzip
import io
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from lockstep.errors import ConfigError, HbmError
from lockstep.launch.slices import FAMILIES
from lockstep.main.plan import CompileCache
from lockstep.main.plan.compiler import COMPILERS, CompileProgress, known_names, names_of, topology

HOSTS = {
    "v4-8": (4, 1), "v4-32": (16, 4), "v5p-8": (4, 1), "v5p-16": (8, 2), "v5p-64": (32, 8), "v5p-512": (256, 64),
    "v5litepod-1": (1, 1), "v5litepod-8": (8, 1), "v5litepod-16": (16, 4), "v6e-8": (8, 1), "v6e-16": (16, 4),
    "v6e-256": (256, 64), "tpu7x-8": (8, 1), "tpu7x-128": (128, 16),
}  # fmt: skip

SCRIPT = """
import json
from lockstep.main.plan.compiler import known_names, topology
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


@pytest.mark.slow
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


def console(**values):
    return Console(file=io.StringIO(), width=100, **values)


def test_a_log_has_a_line_for_each_event():
    log = console()
    progress = CompileProgress(log)
    with progress.live() as live:
        live("decode", "compiling")
        live("decode", "12 s")
    lines = [line.partition("] ")[2] for line in log.file.getvalue().splitlines()]
    assert lines == ["decode: compiling", "decode: 12 s"]


def test_a_name_is_no_markup():
    log = console()
    CompileProgress(log)("step [red]", "compiling")
    assert "step [red]: compiling" in log.file.getvalue()


def test_quiet_prints_nothing():
    log = console()
    with CompileProgress(log, quiet=True).live() as progress:
        progress("decode", "compiling")
    assert log.file.getvalue() == ""


def test_a_terminal_shows_what_is_being_compiled_and_lines_of_what_ended():
    terminal = console(force_terminal=True)
    progress = CompileProgress(terminal)
    with progress.live():
        progress("prefill", "compiling")
        progress("decode", "compiling")
        assert progress._line() == "compiling prefill, decode"
        progress("prefill", "3 s")
        assert progress._line() == "compiling decode"
        progress("decode", "4 s")
        assert progress._line() == "planning"
    shown = terminal.file.getvalue()
    assert "prefill: 3 s" in shown and "prefill: compiling" not in shown


@pytest.fixture
def told():
    return []


def lowered(size=8, scale=2.0):
    return jax.jit(lambda x: x * scale).lower(jax.ShapeDtypeStruct((size,), jnp.float32))


def make(directory, told, topology="v5p-8"):
    return CompileCache(topology, directory, lambda name, what: told.append((name, what)))


def test_the_second_time_nothing_is_compiled(tmp_path, told):
    first = make(tmp_path, told)(lowered(), "f")
    again = make(tmp_path, told)(lowered(), "f")
    assert [what for _, what in told if what == "compiling"] == ["compiling"] and told[-1] == ("f", "from the cache")
    assert (again.memory, again.text, again.digest) == (first.memory, first.text, first.digest)
    assert again.cached and not first.cached and again.memory.argument_size_in_bytes == 32


def test_another_program_or_topology_is_another_result(tmp_path, told):
    for program, named in ((lowered(), "v5p-8"), (lowered(scale=3.0), "v5p-8"), (lowered(), "v6e-8")):
        make(tmp_path, told, named)(program, "f")
    assert len(list(tmp_path.glob("*.json.gz"))) == 3 == sum(what == "compiling" for _, what in told)


def test_a_refusal_is_remembered(tmp_path, told, monkeypatch):
    def compile_(self, *arguments, **options):
        raise RuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (38.00G) "
            "exceeds available HBM (31.24G)."
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    for _ in range(2):
        with pytest.raises(HbmError, match="38.00 GiB") as error:
            make(tmp_path, told)(lowered(), "f")
        assert error.value.limit == int(31.24 * 2**30)
    assert told[-1] == ("f", "known to be too large, from the cache")


def test_a_damaged_file_is_made_again(tmp_path, told):
    make(tmp_path, told)(lowered(), "f")
    (file,) = tmp_path.glob("*.json.gz")
    file.write_bytes(file.read_bytes()[:50])
    make(tmp_path, told)(lowered(), "f")
    assert sum(what == "compiling" for _, what in told) == 2
    assert json.loads(gzip.decompress(file.read_bytes()))["digest"]
    assert not list(tmp_path.glob(".writing-*"))


def test_a_directory_that_cannot_be_written(tmp_path, told):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*--cache_dir"):
        make(file / "below", told)(lowered(), "f")
