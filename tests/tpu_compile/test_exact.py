"""`numerics: exact` through the TPU compiler: decode, prefill and the training forward have the same products.

It is refused on TPUs as long as nobody has compared bits on one; here the programs are compared that would run there.
"""

import collections
import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu", reason="the extra [plan] brings the TPU compiler")

from benchmarks.tpu_programs import weights_on
from lockstep.engine import Engine, EngineConfig, exact_logprobs
from lockstep.models import Experts, LlamaConfig
from lockstep.models.families.family import ModelPreset
from lockstep.placement import make_mesh
from lockstep.types import Request, SamplingParams
from lockstep.xla import Hlo, Op, topology

SMALL = LlamaConfig(
    max_seq_len=256,
    hidden_dim=256,
    intermediate_dim=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    numerics="exact",
)
EXPERTS = dataclasses.replace(
    SMALL, num_layers=1, experts=Experts(num_experts=8, num_experts_per_tok=2, intermediate_dim=256)
)
FLOATS = ("f32", "bf16")


def hlo_of(slice_: str, layout: dict[str, int], config: LlamaConfig = SMALL) -> dict[str, Hlo]:
    """The optimised programs of the engine, and of the training forward."""
    mesh = make_mesh("auto", list(topology(slice_).devices))
    weights = weights_on(mesh, ModelPreset(config=config, vocab_size=512), "bfloat16")
    params = SamplingParams(max_new_tokens=28, temperature=0.7, prompt_logprobs=True)
    requests = [Request(prompt_id=i, prompt_tokens=tuple(range(100)), params=params) for i in range(64)]
    engine = Engine(EngineConfig(layout=layout, memory_bytes_per_device=8 << 30), mesh)
    engine.prepare((config, weights), requests)
    rows = jax.NamedSharding(mesh, jax.P(("dp", "fsdp")))
    with jax.set_mesh(mesh):
        lowered = jax.jit(lambda *given: exact_logprobs(config, *given)[0]).lower(
            weights, jax.ShapeDtypeStruct((16, 256), jnp.int32, sharding=rows)
        )
    texts = {name: engine.programs[name].text() for name in ("decode", "prefill", "prompt_logprobs")}
    return {name: Hlo(text) for name, text in (texts | {"forward": lowered.compile().as_text()}).items()}


def products(hlo: Hlo) -> collections.Counter[tuple[Any, ...]]:
    """Rows, terms of each sum, terms that are in vector memory together, types, precision and emitter of each product.

    How many are computed together (sequences, heads, blocks), and columns, are not among them.
    """
    fusions = {op.called()["calls"][0]: op for _, op in every(hlo) if "calls" in op.called()}
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for computation, op in every(hlo):
        if op.kind not in ("convolution", "dot"):
            continue
        x, weight = (hlo.array_of(computation, name)[0] for name in op.operands)
        _, kernel, _ = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.line).groups()
        inner = kernel.index("i")
        settings = json.loads(re.search(r"backend_config=(\{.*\})", fusions[computation].line)[1])
        window = settings["window_config"]["kernel_window_bounds"][inner]
        precision = re.search(r"operand_precision=\{([\w,]+)\}", op.line)[1]
        emitter = settings["convolution_algorithm_config"]["emitter"]
        types = x.dtype, weight.dtype, op.arrays[0].dtype
        found[op.arrays[0].dims[-2], weight.dims[inner], kernel[-2:], window, *types, precision, emitter] += 1
    return found


def every(hlo: Hlo) -> list[tuple[str, Op]]:
    return [(name, op) for name, computation in hlo.computations.items() for op in computation.values()]


def sums(hlo: Hlo) -> list[str]:
    """The reductions of floats over more than one number that are no maximum, in whose order XLA is free."""
    found = []
    for computation, op in every(hlo):
        if op.kind != "reduce" or op.arrays[0].dtype not in FLOATS or len(op.arrays) > 1:  # the last: an argmax
            continue
        dims = hlo.array_of(computation, op.operands[0])[0].dims
        axes = map(int, re.search(r"dimensions=\{([\d,]+)\}", op.line)[1].split(","))
        (root,) = (each for each in hlo.computations[op.called()["to_apply"][0]].values() if each.root)
        if root.kind not in ("maximum", "minimum") and any(dims[axis] > 1 for axis in axes):
            found.append(op.line)
    return found


def functions(hlo: Hlo) -> set[tuple[str, int]]:
    """Functions of floats, and the last size of the arrays that they are of; but for those of random draws."""
    names = {"exponential", "tanh", "cosine", "sine", "log"}
    return {
        (op.kind, op.arrays[0].dims[-1]) for _, op in every(hlo) if op.kind in names and "temperature" not in op.line
    }


def check(slice_: str, layout: dict[str, int], config: LlamaConfig) -> None:
    programs = hlo_of(slice_, layout, config)
    each = {name: products(hlo) for name, hlo in programs.items()}
    for name, found in each.items():
        print(name, *sorted(found.items()), sep="\n  ")
    # Projections, the output layer, scores, values beside the output projection, and the down projection; the router.
    assert len(each["forward"]) == (6 if config.experts else 5) and {rows for rows, *_ in each["forward"]} == {16}
    assert {precision for *_, precision, _ in each["forward"]} == {"highest,highest"}
    # A device has its own blocks of a sum, and here the forward has all.
    assert set(each["decode"]) == set(each["forward"]), "every product of a layer and of the output layer"
    # How many experts' tiles there are at a time hangs on the number of tokens.
    assert layout["tensor"] > 1 or config.experts or each["decode"] == each["forward"]
    for name, hlo in programs.items():
        assert set(each[name]) <= set(each["forward"]), name
        assert not sums(hlo), name
        assert {size for _, size in functions(hlo)} == {128}, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slice_", "layout", "config"),
    [
        ("v5p-8", {"tensor": 2}, SMALL),
        pytest.param("v5p-8", {"tensor": 1}, SMALL, marks=pytest.mark.nightly),
        pytest.param("v6e-4", {"tensor": 1}, SMALL, marks=pytest.mark.nightly),
        pytest.param("v6e-4", {"tensor": 2}, SMALL, marks=pytest.mark.nightly),
        pytest.param("v5p-8", {"tensor": 1}, EXPERTS, marks=pytest.mark.nightly),
        pytest.param("v5p-8", {"tensor": 2, "expert": 1}, EXPERTS, marks=pytest.mark.nightly),
        pytest.param("v6e-4", {"tensor": 2, "expert": 2}, EXPERTS, marks=pytest.mark.nightly),
    ],
)
def test_decode_prefill_and_training_have_the_same_products(
    slice_: str, layout: dict[str, int], config: LlamaConfig
) -> None:
    check(slice_, layout, config)
