from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.engine import Ledger
from lockstep.engine.program import Program, compile_program
from lockstep.errors import LockstepError
from tests.unit.engine.models import mesh_of


def build(function: Any, ledger: Ledger | None = None, name: str = "double") -> Program:
    mesh = mesh_of("1,4,1")
    struct = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    return compile_program(name, function, [struct], mesh=mesh, ledger=ledger or Ledger())


def test_a_digest_names_what_is_computed() -> None:
    double = build(lambda x: 2 * x)
    same = lambda y: 2 * y  # noqa: E731
    assert double.digest == build(same).digest
    assert double.digest != build(lambda x: 3 * x).digest
    assert len(double.digest) == 64 and double.traces == 1


def test_compiling_launches_nothing() -> None:
    with jax.no_execution(True):
        build(lambda x: x + 1)


def test_launches_are_recorded_in_order() -> None:
    ledgers = [Ledger() for _ in range(3)]
    for ledger, order in zip(ledgers, ("aab", "aba", "aab"), strict=True):
        for name in order:
            ledger.record(name, f"digest of {name}")
    assert str(ledgers[0]) == str(ledgers[2]) != str(ledgers[1])
    assert ledgers[0].launches == ["a", "a", "b"] and str(ledgers[0]).startswith("3 launches, ")


def test_a_launch_that_fails_is_on_record() -> None:
    ledger = Ledger()
    double = build(lambda x: 2 * x, ledger)
    with jax.no_execution(True), pytest.raises(RuntimeError):
        double(jnp.zeros(8))
    with pytest.raises(TypeError):
        double()
    assert ledger.launches == ["double"]


def test_a_program_that_does_not_compile_is_named() -> None:
    def wrong(x: Any) -> Any:
        raise ValueError("no such axis")

    with pytest.raises(LockstepError, match=r"program 'wrong' does not compile on the mesh \{'dp': 1.*: no such axis"):
        build(wrong, name="wrong")
