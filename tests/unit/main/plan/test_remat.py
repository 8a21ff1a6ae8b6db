"""What each policy costs, with the CPU's compiler in place of the TPU's."""

import dataclasses
import io
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from lockstep.errors import CompilerError, HbmError
from lockstep.main.plan.remat import print_remat, remat_costs
from lockstep.models import POLICIES
from tests.unit.main.plan.test_train_step import workload_of


class OnCpu:
    """Compiles for this machine; the fourth program it refuses, for a CPU has no host memory beside its own."""

    def __init__(self):
        self.programs = 0

    def __call__(self, lowered, name):
        self.programs += 1
        if self.programs == 4:
            raise CompilerError("no host memory here")
        found = lowered.compile().memory_analysis()
        sizes = {name: getattr(found, f"{name}_size_in_bytes") for name in ("argument", "temp", "generated_code")}
        # What the compiler for CPUs calls the peak is without temporaries.
        memory = {f"{name}_size_in_bytes": size for name, size in sizes.items()} | {"peak_memory_in_bytes": 0}
        return SimpleNamespace(memory=SimpleNamespace(**memory))


def costs_of(cache, memory=2**40):
    workload = workload_of()
    workload = dataclasses.replace(workload, model=dataclasses.replace(workload.model, num_layers=3))
    return remat_costs(workload, SimpleNamespace(devices=jax.devices()[:1]), cache, memory)


@pytest.mark.slow
def test_each_policy_is_compiled_and_what_keeps_less_computes_more():
    costs = {cost.policy: cost for cost in costs_of(OnCpu())}
    assert tuple(costs) == POLICIES
    assert costs["nothing"].needed > costs["dots"].needed > costs["full"].needed > 0
    assert costs["nothing"].flops == costs["dots"].flops < costs["full"].flops == costs["offload"].flops
    assert costs["full"].fits and costs["offload"].error == "no host memory here"


def test_a_line_for_each_with_the_verdict():
    def refuse(lowered, name):
        raise HbmError("too large", needed=3 * 2**30, limit=2**30)

    console = Console(file=io.StringIO(), width=120)
    print_remat(costs_of(refuse, 2**30), console)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(POLICIES)
    assert all("3.00 GiB" in line and line.endswith("does not fit") for line in lines[1:5])
