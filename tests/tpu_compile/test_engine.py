"""The engine's programs go through the TPU compiler here, on a machine without a TPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from lockstep.engine import Engine, EngineConfig
from lockstep.models import DecoderWeights, LayerWeights, LlamaConfig
from lockstep.placement import make_mesh
from lockstep.types import Request, SamplingParams

layout = json.loads(sys.argv[1])
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2").devices
mesh = make_mesh("auto", list(devices))
# Llama-3-8B (https://arxiv.org/abs/2407.21783, table 3), parameters in float32 over all 8 chips of a v5p-16.
L, D, F, K, G, H, V = 32, 4096, 14336, 8, 4, 128, 128256
config = LlamaConfig(
    max_seq_len=8192, hidden_dim=D, intermediate_dim=F, num_layers=L, num_heads=K * G, num_kv_heads=K
)

def struct(*shape, fsdp):
    spec = PartitionSpec(*("fsdp" if dim == fsdp else None for dim in range(len(shape))))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

weights = DecoderWeights(
    embed=struct(V, D, fsdp=1),
    final_norm=struct(D, fsdp=0),
    lm_head=struct(D, V, fsdp=0),
    layers=LayerWeights(
        attn_norm=struct(L, D, fsdp=1),
        mlp_norm=struct(L, D, fsdp=1),
        q=struct(L, D, K, G, H, fsdp=1),
        k=struct(L, D, K, H, fsdp=1),
        v=struct(L, D, K, H, fsdp=1),
        o=struct(L, K, G, H, D, fsdp=4),
        gate=struct(L, D, F, fsdp=1),
        up=struct(L, D, F, fsdp=1),
        down=struct(L, F, D, fsdp=2),
    ),
)
params = SamplingParams(max_new_tokens=64, temperature=0.7, top_k=50, top_p=0.9, min_p=0.05)
requests = [Request(prompt_id=i, prompt_tokens=tuple(range(64)), params=params) for i in range(64)]
engine = Engine(EngineConfig(layout=layout, max_seq_len=512, dtype="bfloat16"), mesh)
engine.prepare((config, weights), requests)
sizes, figures = engine.sizes, {}
for name, program in engine.programs.items():
    memory = program.memory()
    figures[name] = {
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
figures["pool"] = L * sizes.pages * sizes.page_size * 2 * K * H * 2 // engine.grid.tensor
figures["replicas"] = engine.grid.replicas
figures["sorts"] = engine.programs["decode"]._compiled.as_text().count(" sort(")
print(json.dumps(figures))
"""


# With a tensor group, `test_programs.py` has a cheaper look at the same programs.
@pytest.mark.parametrize(
    "layout", [pytest.param({"tensor": 4}, id="tensor-4", marks=pytest.mark.slow), pytest.param("training")]
)
def test_llama3_8b_compiles_for_v5p_16(layout):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(layout)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-4000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    print({name: figures[name] for name in ("relay", "prefill", "decode")})
    assert figures["replicas"] == (2 if layout != "training" else 8)
    assert figures["sorts"] == 0, "filters are found by bisection"
    for program in ("prefill", "decode"):
        # The pool is updated in place: it is an output that shares the argument's memory.
        assert figures[program]["aliased"] == figures["pool"], program
    # Weights move a layer at a time, large ones in pieces, and are cast on the way; where none move, all are cast.
    assert figures["relay"]["temporaries"] <= 0.1 * figures["relay"]["arguments"]
