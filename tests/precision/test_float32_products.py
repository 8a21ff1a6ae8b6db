"""Float32 on an accelerator that rounds the factors of products to bfloat16: the audit says what that costs."""

import os
import subprocess
import sys

import pytest

# In a process of its own: jax keeps what it has traced, rounded products too.
SCRIPT = """
import jax
import jax.numpy as jnp
from jax._src.lax import lax

exact = lax.dot_general

def as_on_a_tpu(a, b, *others, **options):
    if jax.config.jax_default_matmul_precision is None:
        a, b = (jax.lax.reduce_precision(each, 8, 7) for each in (a, b))
    return exact(a, b, *others, **options)

lax.dot_general = jax.lax.dot_general = as_on_a_tpu

from lockstep.engine import Auditor, Engine, EngineConfig, audit
from tests import tiny
from tests.unit.engine.models import mesh_of
import sys

module = sys.modules["lockstep.engine.audit"]
mesh, requests = mesh_of("1,1,1"), tiny.requests()
model = (tiny.CONFIG, tiny.placed_weights(mesh))
answers = Engine(EngineConfig(page_size=8), mesh).generate(model, requests)
on_cpu = audit(model, requests, answers)
module._multiplies_float32 = lambda mesh: False
on_tpu = audit(model, requests, answers)
print(on_cpu, on_tpu, sep="\\n")
assert on_cpu.logprob_noise is None and on_cpu.logprob_gap == on_tpu.logprob_gap > 1e-3
assert on_tpu.logprob_gap <= 2 * on_tpu.logprob_noise and on_tpu.logprob_gap_mean <= 2 * on_tpu.logprob_noise_mean
"""


@pytest.mark.nightly  # in make slow: tpu_compile/test_exact.py
def test_in_float32_the_noise_of_rounded_products_is_measured() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-4000:]
