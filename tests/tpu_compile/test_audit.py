"""A TPU multiplies float32 as bfloat16 unless it is asked for more; an audit measures what that costs."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")

SCRIPT = """
import json, re, sys
import jax
from benchmarks.tpu_programs import weights_on
from lockstep.engine import Auditor, Engine, EngineConfig
from lockstep.models import LlamaConfig
from lockstep.models.families.family import ModelPreset
from lockstep.placement import make_mesh
from lockstep.xla import topology
from lockstep.types import Request, SamplingParams

jax.config.update("jax_default_matmul_precision", sys.argv[1] or None)
config = LlamaConfig(max_seq_len=256, hidden_dim=256, intermediate_dim=512, num_layers=2, num_heads=2, num_kv_heads=2)
mesh = make_mesh("auto", list(topology("v5p-8").devices))
model = config, weights_on(mesh, ModelPreset(config=config, vocab_size=512), "float32")
params = SamplingParams(max_new_tokens=28)
requests = [Request(prompt_id=i, prompt_tokens=tuple(range(100)), params=params) for i in range(64)]
engine = Engine(EngineConfig(layout={"tensor": 1}, memory_bytes_per_device=8 << 30), mesh)
engine.prepare(model, requests)
auditor = Auditor(mesh, dtype="float32")
auditor.prepare(model, requests)
programs = {"decode": engine.programs["decode"], **auditor.programs}
products = {
    name: [
        match[1] if (match := re.search(r"operand_precision=\\{(\\w+,\\w+)\\}", line)) else "default"
        for line in program.text().splitlines() if " convolution(" in line and " f32[" in line
    ]
    for name, program in programs.items()
}

def cycles(precision):
    factors = [jax.ShapeDtypeStruct(shape, "float32", sharding=one) for shape in ((1024, 4096), (4096, 1024))]
    text = jax.jit(lambda a, b: jax.lax.dot(a, b, precision=precision)).lower(*factors).compile().as_text()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\\d+)"', text)))

one = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
jax.config.update("jax_default_matmul_precision", None)
print(json.dumps({"products": products, "cycles": [cycles(p) for p in (None, "BF16_BF16_F32", "highest")]}))
"""


def compiled(setting: str) -> tuple[dict[str, set[str]], list[int]]:
    """Precisions of products of float32 in each optimised program; cycles of one: by default, in bfloat16, in full."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, setting], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    print(found["cycles"])
    return {name: set(each) for name, each in found["products"].items()}, found["cycles"]


@pytest.mark.nightly  # in make slow: test_exact.py
def test_products_of_float32_are_of_bfloat16_unless_asked_for_more() -> None:
    products, (default, in_bfloat16, full) = compiled("")
    assert products == {"decode": {"default"}, "audit": {"default"}, "audit_float32": {"highest,highest"}}
    assert 0 < default == in_bfloat16 < full / 4, "the default is one product of numbers in bfloat16"


@pytest.mark.nightly
def test_asked_for_more_they_are_of_float32_and_there_is_no_noise_to_measure() -> None:
    products, _ = compiled("highest")
    assert products == {"decode": {"highest,highest"}, "audit": {"highest,highest"}}
