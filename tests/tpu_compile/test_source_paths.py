"""A program with a TPU kernel is the same wherever the package is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

PROGRAM = """
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.models.attention.tpu_kernels import write_entries
from lockstep.placement.device import compile_program
from lockstep.hosts import Ledger
from lockstep.xla import topology

mesh = Mesh(np.array(topology("v5p-8").devices[:1]), ("x",), axis_types=(AxisType.Auto,))


def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


program = compile_program(
    "write",
    lambda pool, index, rows: write_entries(pool, index, rows),
    [struct((64, 8, 128), "bfloat16"), struct((4,), "int32"), struct((4, 8, 128), "bfloat16")],
    mesh=mesh,
    ledger=Ledger(),
)
assert "write_kv" in program.text()
assert jax.config.jax_hlo_source_file_canonicalization_regex is None
print(program.digests["write: StableHLO"])
"""


def digest_of(source: Path, directory: Path) -> str:
    directory.mkdir(exist_ok=True)
    script = directory / "program.py"
    script.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    environment.pop("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", None)  # without locations there is nothing to compare
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_hosts_with_other_home_directories_agree_on_a_program_with_a_kernel(tmp_path):
    here = Path(lockstep.__file__).parents[1]
    shutil.copytree(here / "lockstep", tmp_path / "elsewhere" / "lockstep")
    assert digest_of(here, tmp_path / "one") == digest_of(tmp_path / "elsewhere", tmp_path / "other")
