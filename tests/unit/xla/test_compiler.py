"""Compiled results on disk, and what is shown while they are made."""

import gzip
import io
import json
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from lockstep.errors import ConfigError, HbmError
from lockstep.xla import CompileCache, CompileProgress


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


def test_a_log_says_again_what_takes_long():
    log = console()
    with CompileProgress(log, every=0.01).live() as progress:
        progress("train_step", "compiling")
        deadline = time.monotonic() + 20
        while "still" not in log.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.search(r"s\] still compiling train_step \(0 s\)\n", log.file.getvalue())


def test_a_terminal_shows_what_is_being_compiled_for_how_long_and_lines_of_what_ended(monkeypatch):
    terminal, now = console(force_terminal=True), [100.0]
    monkeypatch.setattr("lockstep.xla.compiler.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = CompileProgress(terminal)
    with progress.live():
        progress("prefill", "compiling")
        now[0] += 62
        progress("decode", "compiling")
        assert progress.__rich__() == "compiling prefill (62 s), decode (0 s)"
        progress("prefill", "3 s")
        terminal.print(progress)
        progress("decode", "4 s")
        assert progress.__rich__() == "planning"
    shown = terminal.file.getvalue()
    assert "prefill: 3 s" in shown and "prefill: compiling" not in shown and "compiling decode (0 s)" in shown


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
    assert again.memory.argument_size_in_bytes == 32


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
