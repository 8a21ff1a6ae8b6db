import os
import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.errors import LockstepError
from lockstep.hosts import Ledger
from lockstep.placement.device.program import (
    Compiler,
    Program,
    compile_program,
    without_directories,
    without_source_locations,
)
from tests.unit.engine.models import mesh_of


def build(function: Any, ledger: Ledger | None = None, name: str = "double", **options: Any) -> Program:
    mesh = mesh_of("1,4,1")
    struct = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    return compile_program(name, function, [struct], mesh=mesh, ledger=ledger or Ledger(), **options)


def test_a_digest_names_what_is_computed() -> None:
    double = build(lambda x: 2 * x)
    same = lambda y: 2 * y  # noqa: E731
    assert double.digest == build(same).digest
    assert double.digest != build(lambda x: 3 * x).digest
    assert len(double.digest) == 64 and double.traces == 1


def test_compiling_launches_nothing() -> None:
    with jax.no_execution(True):
        build(lambda x: x + 1)


def test_the_digests_say_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    double, triple = build(lambda x: 2 * x), build(lambda x: 3 * x)
    names = ["double: StableHLO", "double: devices and options", "double: optimised HLO (may differ)"]
    assert list(double.digests) == names
    differ = [name for name, text in double.digests.items() if triple.digests[name] != text]
    assert differ == [names[0], names[2]]
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true")
    flagged = build(lambda x: 2 * x)
    assert [name for name, text in double.digests.items() if flagged.digests[name] != text] == [
        "double: devices and options"
    ]


def test_options_of_the_compiler_are_in_the_digest_and_one_that_it_does_not_know_is_left_out() -> None:
    plain, other = (
        build(lambda x: 2 * x),
        build(lambda x: 2 * x, compiler=Compiler(options={"xla_of_another_version": "1"})),
    )
    differ = [name for name, text in plain.digests.items() if other.digests[name] != text]
    assert differ == ["double: devices and options"] and other.traces == 1
    with pytest.raises(LockstepError, match="xla_cpu_enable_fast_math"):
        build(lambda x: 2 * x, compiler=Compiler(options={"xla_cpu_enable_fast_math": "neither"}))


def test_what_the_compiler_made_of_it_is_not_in_the_digest_of_launches() -> None:
    def renamed(lowered: jax.stages.Lowered, name: str, options: object) -> Any:
        compiled = lowered.compile()
        return SimpleNamespace(as_text=lambda: f"{compiled.as_text()} // from a cache")

    double, other = build(lambda x: 2 * x), build(lambda x: 2 * x, compiler=Compiler(compile_with=renamed))
    assert double.digests != other.digests and double.digest == other.digest


def test_places_in_source_files_are_no_part_of_a_program() -> None:
    """Their numbers differ between a program that was compiled and the same from the cache on disk."""
    hlo = """HloModule jit_f, is_scheduled=true

FileNames
1 "a.py"

FunctionNames
1 "f"

StackFrames
1 {file_location_id=%d parent_frame_id=1}


ENTRY %%main (x: f32[]) -> f32[] {
  ROOT %%add = f32[] add(%%x, %%x), metadata={op_name="jit(f)/add" stack_frame_id=%d}
}
"""
    found = {without_source_locations(hlo % (number, number)) for number in (1, 2)}
    assert len(found) == 1 and "ROOT %add = f32[] add(%x, %x)\n" in found.pop()


def test_a_launch_that_fails_is_on_record() -> None:
    ledger = Ledger()
    double = build(lambda x: 2 * x, ledger)
    with jax.no_execution(True), pytest.raises(RuntimeError, match="no_execution"):
        double(jnp.zeros(8))
    with pytest.raises(TypeError, match="does not match the input pytree it was called with"):
        double()
    assert ledger.launches == ["double"]


def test_a_program_that_does_not_compile_is_named() -> None:
    def wrong(x: Any) -> Any:
        raise ValueError("no such axis")

    with pytest.raises(LockstepError, match=r"program 'wrong' does not compile on the mesh \{'dp': 1.*: no such axis"):
        build(wrong, name="wrong")


def test_threads_that_lower_programs_take_turns() -> None:
    """`lockstep plan` traces one program while another is traced: neither takes the setting away from the other."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with without_directories():
            inside.set()
            leave.wait(60)
            seen.append(jax.config.jax_hlo_source_file_canonicalization_regex)

    thread = threading.Thread(target=other)
    with without_directories():
        thread.start()
        inside.wait(0.2)  # that it does not come in
    leave.set()
    thread.join(60)
    assert seen == ["^.*/"] and jax.config.jax_hlo_source_file_canonicalization_regex is None
