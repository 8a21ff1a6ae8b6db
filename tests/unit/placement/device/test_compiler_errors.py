"""Compilers' errors in words that help. The texts are those of libtpu 0.0.46.3, cut short."""

import pytest

from lockstep.errors import CompilerError, HbmError, VmemError
from lockstep.placement.device.compiler_errors import explain

SCOPED_VMEM = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem while allocating on "
    "stack for %ragged_paged_attention = bf16[1024,32,128] custom-call(...). Scoped allocation with size 33.26M and "
    "limit 16.00M exceeded scoped vmem limit by 17.26M. It should not be possible to run out of scoped vmem"
)
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (38.00G) exceeds "
    "available HBM (31.24G). HLO module: jit__step."
)
LATE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 33.06G of 31.24G "
    "hbm. Exceeded hbm capacity by 1.82G."
)


def test_a_kernel_beyond_the_vector_memory():
    error = explain("prefill", {"grid0": 8}, RuntimeError(SCOPED_VMEM))
    assert isinstance(error, VmemError)
    assert (error.needed, error.limit) == (int(33.26 * 2**20), 16 * 2**20)
    for part in (
        "'prefill'",
        "VMEM",
        "33.26 MiB",
        "16.00 MiB",
        "smaller blocks",
        "vmem_limit_bytes",
        "leave the blocks",
    ):
        assert part in str(error)


@pytest.mark.parametrize(("text", "needed"), [(EARLY, 38.0), (LATE, 33.06)])
def test_a_program_beyond_the_device(text, needed):
    error = explain("train_step", {}, RuntimeError(text))
    assert isinstance(error, HbmError)
    assert (error.needed, error.limit) == (int(needed * 2**30), int(31.24 * 2**30))


def test_anything_else_is_named_and_cut_short():
    error = explain("decode", {"tp": 2}, ValueError("mosaic\n" + "x" * 700_000))
    assert type(error) is CompilerError
    assert "program 'decode' does not compile on the mesh {'tp': 2}: mosaic x" in str(error)
    assert len(str(error)) < 500
    assert str(explain("reshard", {}, AssertionError())).endswith("on the mesh {}: AssertionError"), "it has no text"
