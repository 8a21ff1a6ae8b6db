"""What the TPU compiler makes of the engine's programs for Llama-3.1-8B: read off its own output, no TPU needed."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")

LAYERS = 32


def compiled(
    slice_name: str, tensor: int, batch: int, model: str = "llama-3.1-8b", *, drafts: bool = False, options: str = ""
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tpu_programs", "--slice", slice_name, "--tensor", str(tensor)]
    run = subprocess.run(
        [*command, "--batch", str(batch), "--model", model, *["--drafts"] * drafts, *options.split()],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slice_name", "tensor"),
    [
        ("v5p-16", 4),
        pytest.param("v5p-16", 1, marks=pytest.mark.nightly),
        pytest.param("v5p-64", 4, marks=pytest.mark.nightly),
        pytest.param("v6e-16", 4, marks=pytest.mark.nightly),
    ],
)
def test_programs_of_llama_3_1_8b(slice_name: str, tensor: int) -> None:
    found = compiled(slice_name, tensor, 64, options="--filters")
    check(found)
    check_memory(found)


@pytest.mark.nightly
def test_long_contexts_split_over_devices() -> None:
    """131,072 tokens of Llama-3.1-8B: 16 devices that have each kv head twice, or each half of its positions."""
    options = "--context 130944"
    twice, split = (compiled("v5p-32", 16, 4, options=f"{options} --split {devices}") for devices in (1, 2))
    print([(each["pool"], each["kernel"], each["per_token"]) for each in (twice, split)])
    assert split["pool"] < 0.51 * twice["pool"] and split["floor_kv"] == twice["floor_kv"] / 2
    assert split["kernel"] < 0.51 * twice["kernel"] and split["ratio"] < 1.02
    programs, predicted = split["programs"], split["predicted"]
    for name in ("prefill", "decode"):
        assert programs[name]["pool_copies"] == 0 and programs[name]["aliased"] == split["pool"]
        assert programs[name]["temporaries"] + programs[name]["code"] <= predicted[name]
    steps = [one["kind"] for one in programs["decode"]["collectives"] if one["in_step"] and one["times"] == LAYERS]
    assert sorted(steps) == ["all-gather", "all-reduce", "all-reduce", "all-to-all"]


@pytest.mark.nightly
@pytest.mark.parametrize("tensor", [1, 2])
def test_programs_on_tpu7x(tensor: int) -> None:
    """Its compiler copies each layer's output projection once more before a step reads it."""
    found = compiled("tpu7x-8", tensor, 64, options="--filters")
    check(found, ratio=1.13)
    measured = {name: each["temporaries"] + each["code"] for name, each in found["programs"].items()}
    print(found["predicted"], measured, found["ratio"])
    for name in ("reshard", "prefill", "decode"):
        assert measured[name] <= found["predicted"][name], name


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "slice_name", "tensor", "batch"), [("qwen2.5-3b", "v5p-16", 1, 64), ("llama-3.1-8b", "v6e-16", 4, 256)]
)
def test_predicted_memory_of_other_sizes(model: str, slice_name: str, tensor: int, batch: int) -> None:
    """A tied vocabulary that is large beside the layers, and batches whose vocabulary does not fit vector memory."""
    check_memory(compiled(slice_name, tensor, batch, model))


@pytest.mark.nightly
@pytest.mark.parametrize(("slice_name", "tensor", "weight_dtype"), [("v5p-16", 4, "int8"), ("v6e-16", 4, "fp8")])
def test_weights_in_8_bits(slice_name: str, tensor: int, weight_dtype: str) -> None:
    """Few sequences of 512 tokens, as of a round of samples: weights are most of what a step reads."""
    small = "--context 512"
    whole = compiled(slice_name, tensor, 8, options=small)
    found = compiled(slice_name, tensor, 8, options=f"{small} --weight-dtype {weight_dtype}")
    print({name: (whole[name], found[name]) for name in ("bytes", "floor_weights", "weights")})
    assert found["floor_weights"] <= 0.54 * whole["floor_weights"], "all but the output layer, and the scales"
    assert found["bytes"] <= 0.6 * whole["bytes"]
    assert found["ratio"] <= 1.15, "no weight is widened in memory"
    programs, predicted = found["programs"], found["predicted"]
    assert programs["reshard"]["outputs"] <= 1.01 * found["weights"]
    measured = {name: programs[name]["temporaries"] + programs[name]["code"] for name in ("prefill", "decode")}
    measured["reshard"] = programs["reshard"]["temporaries"]
    print(predicted, measured)
    for name, size in measured.items():
        assert size <= predicted[name], name


def check(found: dict[str, Any], ratio: float = 1.065) -> None:
    """The promises of docs/architecture.md about the programs of one slice."""
    programs, held = found["programs"], found["pool"] + found["weights"]
    for name in ("prefill", "copy_pages", "decode"):
        assert programs[name]["pool_copies"] == 0, name
        assert programs[name]["aliased"] == found["pool"], name
        assert programs[name]["temporaries"] < 0.15 * held, name
    assert programs["decode"]["kernels"] == 2, "write and attend, inside the loop over layers"
    assert programs["prefill"]["kernels"] == 3, "and the last layer only writes"
    assert all(programs[name]["pool_scatters"] == 0 for name in ("prefill", "copy_pages", "decode"))

    steps = [one for one in programs["decode"]["collectives"] if one["in_step"]]
    assert not any(one["crosses_replicas"] for one in steps)
    # With top-k, top-p and min-p in use: slots go to devices and their thresholds come back, once per token.
    assert found["filter_collectives"] == (2 if found["tensor"] > 1 else 0)
    width = found["slots"] * 4096 * 2
    if found["tensor"] == 1:
        assert not steps
    of_layers = [one for one in steps if one["kind"] == "all-reduce" and one["bytes"] == width]
    # Attention and MLP of every layer, and the embedding, whose rows the devices of a replica share.
    assert sum(one["times"] for one in of_layers) == (2 * LAYERS + 1 if found["tensor"] > 1 else 0)

    # Moving a float32 model begins with no copy in bfloat16: three layers and a piece are in flight at most.
    assert programs["reshard"]["temporaries"] < 0.15 * found["weights"]
    assert 1 <= found["ratio"] <= ratio, "bytes of a step over the least that it could move"


def check_memory(found: dict[str, Any]) -> None:
    """Predicted temporaries, the program itself among them, against the compiler's own: never less, and little more.

    Prefill is far from the worst; of a batch so small the compiler keeps more or less in vector memory.
    """
    predicted, programs, v6e = found["predicted"], found["programs"], "v6e" in found["chip"]
    measured = {name: programs[name]["temporaries"] + programs[name]["code"] for name in ("prefill", "decode")}
    measured["reshard"] = programs["reshard"]["temporaries"]
    print(predicted, measured)
    assert measured["prefill"] <= predicted["prefill"] < min(predicted["decode"], 2.1 * measured["prefill"])
    # A v6e has 128 MiB of vector memory, so that decode took 43 (512 sequences) to 143 MiB (256) less of HBM; the
    # prediction counts on 40.
    in_vector_memory = (128 - 40) << 20 if v6e else 0
    assert measured["decode"] <= predicted["decode"] <= 1.15 * measured["decode"] + in_vector_memory
    assert measured["reshard"] <= predicted["reshard"]
    if not v6e:  # there the pieces of some models never leave the vector memory
        assert predicted["reshard"] <= 1.11 * measured["reshard"]

    def total(of: dict[str, int]) -> int:
        return found["weights"] + max(of["reshard"], found["pool"] + max(of["prefill"], of["decode"]))

    assert total(measured) <= total(predicted) <= 1.03 * total(measured)
