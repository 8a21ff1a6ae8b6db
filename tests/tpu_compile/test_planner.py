"""`lockstep plan` with the real TPU compiler, as a user calls it."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [plan]")

from lockstep.main.arguments import parse_arguments
from lockstep.main.cli import run_alone
from lockstep.main.commands import find_command
from lockstep.placement.device import save_calibration
from lockstep.plan import make_plan
from lockstep.xla import CompileCache, topology
from tests.snippets import commands_before, lacking

ROOT = Path(__file__).parents[2]
TINY = ROOT / "config" / "simpo_tiny.yaml"
TINY_MODEL = "{type: llama, hidden_dim: 128, intermediate_dim: 256, num_layers: 2, num_heads: 4, num_kv_heads: 4}"
SAMPLER = "sampler/sample_llama8b_multihost"


def words_of(arguments, out, cache):
    out.unlink(missing_ok=True)
    return ["plan", "--cache_dir", str(cache), "--json", str(out), *map(str, arguments)]


def plan(*arguments, cache):
    """Exit code, what was printed, what was written as JSON: in this process, which has JAX and the compiler."""
    out, text, kept = Path(cache) / "plan.json", io.StringIO(), jax.config.jax_enable_compilation_cache
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = run_alone(words_of(arguments, out, cache), debug=False)
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
    return code, text.getvalue(), json.loads(out.read_text()) if out.exists() else None


def process(code, *words):
    """What Python prints for a program, in a process of its own, and its exit code."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def tiny(cache):
    """As a user calls it."""
    out = cache / "tiny.json"
    words = ("--config_path", TINY, "--topology", "v6e-8", "--dollars_per_chip_hour", "2.5")
    run = process("from lockstep.main.cli import main; main()", *words_of(words, out, cache))
    return run.returncode, run.stdout + run.stderr, json.loads(out.read_text())


@pytest.mark.nightly  # in make slow: unit/plan
def test_the_run_is_told_with_what_it_is_expected_to_cost(tiny):
    _, text, found = tiny
    expected, run = found["train_step"]["expected"], found["run"]
    assert expected["step_s"] > found["train_step"]["predicted_at_best"]["step_s"] and expected["errors"] == [
        -0.06,
        0.08,
    ]
    assert run["step_s"] == expected["step_s"] and run["steps"] > 0
    assert run["chip_hours"] == pytest.approx(run["steps"] * run["step_s"] * 8 / 3600)
    assert run["dollars"] == pytest.approx(2.5 * run["chip_hours"])
    assert (
        "expected: train step " in text and f"the run's {run['steps']:,} steps of " in text and " at $2.5 each" in text
    )


@pytest.mark.nightly  # in make slow: two slices below
def test_what_fits_is_told_in_full(tiny):
    code, text, found = tiny
    assert code == 0, text
    assert found["fits"] and found["refusals"] == [] and found["topology"]["hosts"] == 1
    assert "fits" in text and "HBM per device" in text
    step, samples = found["hbm_bytes_per_device"]["training step"], found["hbm_bytes_per_device"]["inference_eval"]
    assert step["parameters"] == samples["parameters"] > 0, "training state stays while sampling"
    assert step["optimizer"] >= 2 * step["parameters"], "two moments"
    for moment in (step, samples):
        parts = sum(value for name, value in moment.items() if name not in ("total", "headroom"))
        assert parts == moment["total"] and moment["total"] + moment["headroom"] == found["chip"]["memory_bytes"]
    assert samples["KV pages"] > 0 and step["KV pages"] == 0
    assert set(found["sampling"]["inference_eval"]["digests"]) >= {"new_cache", "prefill", "decode"}
    assert found["train_step"]["microbatches"] == 1
    assert found["train_step"]["collectives"], "FSDP gathers"
    assert not any(one["crosses_hosts"] for one in found["train_step"]["collectives"]), "a v6e-8 is one host"
    sampling = found["sampling"]["inference_eval"]
    assert sampling["predicted_at_best"]["tokens_per_s"] > 0
    # Each replica is a device: its steps are its own, and the launch gathers the results of all replicas as one array.
    assert sampling["layout"] == {"tensor": 1} and sampling["collectives_per_decode_step"] == []
    once = {one["kind"]: one["count"] for one in sampling["collectives_per_decode_launch"]}
    assert once == {"all-reduce": 1, "all-gather": 1}


def exchanged_in(sampling):
    """The bytes that slices exchange in a launch of decode; nothing anywhere else."""
    for name in ("collectives_per_relay", "collectives_per_decode_step", "collectives_per_prefill_launch"):
        assert not any(one["crosses_slices"] for one in sampling[name]), name
    found = sum(one["bytes"] for one in sampling["collectives_per_decode_launch"] if one["crosses_slices"])
    assert found < 64 << 10
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["global_mesh", "host_data_parallel"])
def test_the_sampler_is_planned_for_two_slices(mode, cache):
    code, text, found = plan(
        "--config_path", "config/sampler/demo.yaml", "--topology", "2xv6e-16", "--inference_mode", mode,
        "--model", "Qwen2.5-0.5B-Instruct", cache=cache,
    )  # fmt: skip
    assert code == 0, text
    (sampling,) = found["sampling"].values()
    assert bool(exchanged_in(sampling)) == (mode == "global_mesh"), "hosts for themselves exchange nothing"


@pytest.mark.nightly
def test_grpo_is_planned_for_two_slices(cache, tmp_path):
    demo = (ROOT / "config" / "grpo_demo.yaml").read_text(encoding="utf-8")
    config = tmp_path / "grpo.yaml"
    config.write_text(re.sub(r"(?m)^initialize_from_hf: .*", f"model: {TINY_MODEL}", demo), encoding="utf-8")
    code, text, found = plan("--config_path", config, "--topology", "2xv6e-16", cache=cache)
    assert code == 0, text
    assert {one["kind"] for one in found["train_step"]["collectives"] if one["crosses_slices"]} == {"all-reduce"}
    assert set(found["sampling"]) == {"rollout", "inference_eval"}
    assert all(map(exchanged_in, found["sampling"].values()))


@pytest.mark.slow
def test_two_slices_are_planned(cache):
    """All of the step stays inside a slice but one sum of its gradients; decode exchanges its results alone."""
    code, text, found = plan(
        "--config_path",
        TINY,
        "--topology",
        "2xv5p-16",
        "--meshes",
        "all",
        "--trainer.per_device_parallelism",
        "1",
        "--trainer.distributed.require_process_count",
        "2",
        cache=cache,
    )
    assert code == 0, text
    assert found["mesh"] == {"dcn": 2, "dp": 1, "fsdp": 8, "tp": 1} and found["topology"]["hosts"] == 4
    assert {tuple(mesh["sizes"].values()) for mesh in found["meshes"]} == {(2, 1, 8, 1), (2, 2, 4, 1)}
    step, sampling = found["train_step"], found["sampling"]["inference_eval"]
    (between,) = (one for one in step["collectives"] if one["crosses_slices"])
    assert (between["kind"], between["devices"]) == ("all-reduce", 2)
    gradients = found["hbm_bytes_per_device"]["training step"]["parameters"]
    assert gradients <= between["bytes"] < 1.2 * gradients
    assert step["predicted_at_best"]["slices_bytes"] == between["bytes"]
    assert step["predicted_at_best"]["slices_s"] == pytest.approx(between["bytes"] / 6.25e9)
    assert exchanged_in(sampling), "the results of a launch"
    assert "2 slices add up their gradients once a step: " in text and " at 25 GB/s per host take " in text
    assert "dcn, dp, fsdp, tp" in text


@pytest.mark.nightly
def test_the_second_time_comes_from_the_cache(tiny, cache):
    code, text, found = plan(
        "--config_path", TINY, "--topology", "v6e-8", "--dollars_per_chip_hour", "2.5", cache=cache
    )
    assert code == 0 and "compiling" not in text and "from the cache" in text
    assert found == tiny[2]


@pytest.mark.slow
def test_a_calibration_file_changes_the_predicted_seconds_and_nothing_else(tiny, cache, tmp_path):
    """A chip with a quarter of the bandwidth, an eighth of the operations and half the bandwidth of the links."""
    published, file = tiny[2], tmp_path / "calibration.json"
    chip = published["chip"]
    save_calibration(
        file, chip="TPU v6e", measured="2026-11-24 in a test", bandwidth=chip["bandwidth_bytes_per_s"] / 4,
        flops=chip["flops_per_s"] / 8, link={"bandwidth": chip["link_bytes_per_s"] / 2, "latency_s": 1e-3},
    )  # fmt: skip
    arguments = ("--config_path", TINY, "--topology", "v6e-8", "--calibration", file)
    code, text, found = plan(*arguments, cache=cache)
    assert code == 0 and "compiling" not in text and "from the cache" in text, text
    assert f"measured 2026-11-24 in a test ({file})" in found["chip"]["source"]
    step, before = (each["train_step"]["predicted_at_best"] for each in (found, published))
    assert step["memory_s"] == pytest.approx(4 * before["memory_s"])
    assert step["compute_s"] == pytest.approx(8 * before["compute_s"])
    assert step["collectives_s"] == pytest.approx(2 * before["collectives_s"])
    assert step["tokens_per_s"] <= 0.51 * before["tokens_per_s"]
    sampling, before = (each["sampling"]["inference_eval"] for each in (found, published))
    assert sampling["predicted_at_best"]["step_s"] == pytest.approx(4 * before["predicted_at_best"]["step_s"])
    assert sampling["predicted_at_best"]["round_s"] > 4 * before["predicted_at_best"]["round_s"], "a round has latency"
    assert sampling["digests"] == before["digests"] and sampling["sizes"] == before["sizes"]
    assert found["hbm_bytes_per_device"] == published["hbm_bytes_per_device"]

    save_calibration(file, chip="TPU v5p", measured="2026-11-24 in a test", bandwidth=2e12)
    code, text, found = plan(*arguments, cache=cache)
    assert code != 0 and found is None
    assert "was measured on TPU v5p, and the devices are TPU v6e" in text.replace("\n", " ") and "Traceback" not in text


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_line_to_change(cache):
    """Long answers in a thousandth of the memory; a batch that the slice cannot split; a job of another size."""
    code, text, found = plan(
        "--config_path", TINY, "--topology", "v6e-8", "--model.max_seq_len", "200000",
        "--inference_eval.max_new_tokens", "100000", "--inference_eval.hbm_utilization", "0.001",
        "--trainer.train_batch_size", "36", "--trainer.distributed.require_process_count", "8", cache=cache,
    )  # fmt: skip
    assert code == 1, text
    by_key = {refusal["key"]: refusal for refusal in found["refusals"]}
    answer = by_key["inference_eval.max_new_tokens"]
    assert 0 < answer["largest"] < 100000 and "--inference_eval.max_new_tokens on the command line" in text
    batch = by_key["trainer.train_batch_size"]
    assert "multiple of 8" in batch["text"]
    assert "require_process_count is 8, and v6e-8 has 1 hosts" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_rows_longer_than_the_model_are_refused(cache):
    code, text, found = plan(
        "--config_path", TINY, "--topology", "v6e-8", "--data.max_seq_len", "50", "--inference_eval.enabled", "false",
        cache=cache,
    )  # fmt: skip
    assert code == 1, text
    (refusal,) = found["refusals"]
    assert (refusal["key"], refusal["value"], refusal["largest"]) == ("data.max_seq_len", 50, 48)
    assert refusal["place"] == "--data.max_seq_len on the command line"
    assert "data.max_seq_len is 50; the largest that works is 48" in text and "Traceback" not in text
    assert found["train_step"]["predicted_at_best"]["tokens"] == 32 * 2 * 48, (
        "the step is planned with the longest rows that the model takes"
    )


@pytest.mark.nightly
def test_exact_numerics_are_planned_with_their_price(cache):
    code, text, found = plan(
        "--config_path", TINY, "--topology", "v6e-8", "--model.numerics", "exact", "--trainer.mp", "p=f32,c=bfloat16",
        cache=cache,
    )  # fmt: skip
    assert (code, found["refusals"]) == (0, []), text
    assert "the price of numerics exact, which multiplies 16 rows at a time: a train step" in text
    step = found["train_step"]["predicted_at_best"]
    assert step["step_s"] == step["collectives_s"] + step["exact_s"] > step["exact_s"] > 0


ENGINE = """
import json, sys
from lockstep.engine import Engine
from lockstep.placement import make_mesh
from lockstep.plan.train_step import compile_step, make_state
from lockstep.xla import CompileCache, topology
from tests.tpu_compile.test_planner import chosen, tiny_workload

name, free, microbatches = sys.argv[1:]
slice_, work = topology(name), tiny_workload()
mesh = make_mesh("auto", list(slice_.devices))
state, (sampling,) = make_state(work, mesh), work.sampling
engine = Engine(sampling.engine, mesh)
engine.prepare(state.structs.model, sampling.requests, free=int(free))
cache = CompileCache(slice_.name, None, lambda *_: None)
train = compile_step(work, mesh, state, cache, microbatches=int(microbatches)).digest
digests = {name: program.digest for name, program in engine.programs.items()}
print(json.dumps([chosen(engine.sizing), digests, train]))
"""
"""What the callback does on the devices of a slice: an engine of its own, which compiles with the compiler itself."""


def tiny_workload():
    command = find_command("train-simpo")
    return command.workload(parse_arguments(command.config(), ["--config_path", str(TINY)]))


def chosen(sizing):
    return [repr(value) for value in (sizing.layout, sizing.sizes, sizing.compiled)]


@pytest.mark.slow
def test_plan_and_engine_choose_the_same_on_every_process():
    """One function, two callers; two processes compile the same programs."""
    slice_ = topology("v5p-16")
    made = make_plan(tiny_workload(), slice_, CompileCache(slice_.name, None, lambda *_: None))
    (planned,) = made.sampling
    run = process(ENGINE, "v5p-16", str(made.memory - made.resident), str(made.training.microbatches))
    assert run.returncode == 0, run.stderr[-4000:]
    sizing, digests, train = json.loads(run.stdout.splitlines()[-1])
    assert (sizing, digests, train) == (chosen(planned.sizing), planned.digests, made.training.summary.digest)
    assert len(digests) >= 3


VMEM = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from lockstep.placement.device.program import Ledger, compile_program
from lockstep.errors import VmemError
from lockstep.xla import topology

mesh = Mesh(np.array(topology("v5p-8").devices[:1]), ("x",), axis_types=(AxisType.Auto,))
def struct(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
arguments = [struct(1024, 32, 128, dtype=jnp.bfloat16), struct(288, 128, 16, 128, dtype=jnp.bfloat16), struct(64),
             struct(64, 36), struct(65), struct(1)]
def prefill(*arrays):
    return ragged_paged_attention(*arrays, num_kv_pages_per_block=32, num_queries_per_block=8)
mapped = jax.shard_map(prefill, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
try:
    compile_program("prefill", mapped, arguments, mesh=mesh, ledger=Ledger())
except VmemError as error:
    print("VMEM:", error, error.needed, error.limit)
"""


@pytest.mark.nightly
def test_a_kernel_beyond_the_vector_memory_is_told_as_such():
    """The failure that cost earlier attempts days: blocks of 32 pages and 8 queries, no limit."""
    run = process(VMEM)
    assert run.returncode == 0, run.stderr[-4000:]
    last = run.stdout.splitlines()[-1]
    assert last.startswith("VMEM: program 'prefill': an attention kernel does not fit the vector memory"), run.stdout
    assert "leave the blocks to it" in last and int(last.split()[-2]) > int(last.split()[-1]) > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "slice_", "attention"),
    [
        (model, slice_, attention)
        for model, slices, attention in (
            ("c4ai-command-r7b-12-2024", ("v5p-16", "v6e-16"), "TPU kernel"),
            ("GLM-4-9B-0414", ("v5p-16", "v6e-16"), "TPU kernel"),
            ("GLM-4.5-Air", ("v5p-16", "v6e-16"), "TPU kernel"),
            ("Qwen3-Next-80B-A3B-Instruct", ("v5p-16", "v6e-16"), "plain JAX"),
            ("DeepSeek-V2-Lite", ("v5p-16",), "plain JAX"),
            ("DeepSeek-V3", ("v5p-64", "v6e-128"), "plain JAX"),
        )
        for slice_ in slices
    ],
)
def test_sampling_of_a_published_model_is_planned_by_its_name(model, slice_, attention, cache):
    code, text, found = plan(
        "--config_path", "config/sampler/demo.yaml", "--topology", slice_, "--inference_mode", "global_mesh",
        "--model", model, cache=cache,
    )  # fmt: skip
    assert (code, found["fits"]) == (0, True) and f"attention: {attention}" in text, text


@pytest.mark.nightly
@pytest.mark.parametrize(("slice_", "hosts"), [("v5p-64", 8), ("v6e-64", 16)])
@pytest.mark.parametrize("model", ["c4ai-command-r7b-12-2024", "GLM-4-9B-0414"])
def test_training_of_a_published_model_is_planned_by_its_name(model, slice_, hosts, cache):
    code, text, found = plan(
        "--config_path", "config/simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "--topology", slice_,
        "--initialize_from_hf", model, "--trainer.distributed.require_process_count", hosts,
        "--trainer.per_device_parallelism", 1, cache=cache,
    )  # fmt: skip
    assert (code, found["fits"]) == (0, True), text


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "received"),
    [
        ("DeepSeek-V2-Lite", 1.05),  # experts are gathered by placement.gather
        ("Qwen3.5-27B", 1.35),  # rings of nine permutations where seven would do (ADR 17)
    ],
)
def test_a_model_with_a_latent_or_a_state_is_trained_on_a_v5p_16(model, received, cache, tmp_path):
    config = tmp_path / "lm.yaml"
    config.write_text(
        f"initialize_from_hf: {model}\ntokenizer: {model}\ninference_eval: {{enabled: false}}\n"
        "data: {train_urls: [x.jsonl], max_seq_len: 2048}\n"
        "trainer: {num_train_steps: 100, train_batch_size: 64, per_device_parallelism: 1, mp: 'p=f32,c=bfloat16'}\n",
        encoding="utf-8",
    )
    code, text, summary = plan("--command", "train-lm", "--config_path", config, "--topology", "v5p-16", cache=cache)
    assert (code, summary["fits"]) == (0, True), text
    assert 1 <= summary["train_step"]["fsdp"]["ratio"] < received, text


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["docs/plan.md:text:0", "README.md:text:0"])
def test_what_the_pages_show_of_the_plan_for_a_v5p_64_is_printed(name, cache):
    (words,) = [shlex.split(line)[2:] for line in commands_before(name) if line.startswith("lockstep plan")]
    code, text, found = plan(*words, cache=cache)
    assert code == 0 and found["fits"], text
    assert lacking(name, text) is None, text


@pytest.mark.nightly  # in make slow: two slices below, and test_programs.py
@pytest.mark.parametrize(
    ("name", "slice_"),
    [
        ("sampler/gsm8k_qwen25_3b_v6e_8", "v6e-8"),
        ("sampler/sample_qwen3_30b_a3b_v6e_16", "v6e-16"),
        ("lm_llama31_8b_128k_v5p_64", "v5p-64"),
        ("grpo_gsm8k_qwen3_30b_a3b_v5p_64", "v5p-64"),
        ("grpo_gsm8k_qwen25_3b_v6e_8", "v6e-8"),
        ("grpo_gsm8k_qwen25_3b_v6e_16", "v6e-16"),
        (SAMPLER, "v5p-16"),
        (f"{SAMPLER}_real", "v5p-16"),
        (f"{SAMPLER}_128prompts_2048_hostdp_wandb_v5p16", "v5p-16"),
        (f"{SAMPLER}_128prompts_2048_hostdp_wandb_v5p32", "v5p-32"),
    ],
)
def test_every_pod_configuration_fits_its_slice(name, slice_, cache):
    code, text, found = plan("--config_path", f"config/{name}.yaml", "--topology", slice_, cache=cache)
    print(text)
    assert code == 0 and found["fits"], text


@pytest.mark.nightly  # in make slow: two slices below
def test_rows_split_over_devices(cache):
    """The kernel of a split row; keys and values are gathered, the states of a row never."""
    code, text, found = plan(
        "--config_path", TINY, "--topology", "v6e-8", "--trainer.mesh_shape", "fsdp=2,cp=4", "--data.max_seq_len",
        "1024", "--model.max_seq_len", "1024", "--inference_eval.enabled", "false", cache=cache,
    )  # fmt: skip
    assert code == 0 and found["mesh"] == {"dp": 1, "fsdp": 2, "cp": 4, "tp": 1}, text
    assert "collective-permute" in text and "all-gather" in text


@pytest.mark.nightly
def test_both_meshes_side_by_side(cache, tmp_path):
    """Full-device FSDP gathers over all hosts; host_local inside each, and sums gradients between them."""
    demo = (ROOT / "config" / "grpo_demo.yaml").read_text(encoding="utf-8")
    config = tmp_path / "grpo.yaml"
    config.write_text(re.sub(r"(?m)^initialize_from_hf: .*", f"model: {TINY_MODEL}", demo), encoding="utf-8")
    code, text, found = plan(
        "--config_path", str(config), "--topology", "v6e-16", "--meshes", "all",
        "--inference_eval.enabled", "false", cache=cache,
    )  # fmt: skip
    assert code == 0, text
    auto, local = found["meshes"]
    assert (auto["mesh_shape"], auto["sizes"]) == ("auto", {"dp": 1, "fsdp": 16, "tp": 1})
    assert (local["mesh_shape"], local["sizes"]) == ("host_local", {"dp": 4, "fsdp": 4, "tp": 1})
    assert auto["received_across_hosts"] == auto["received"] > 0
    assert 0 < local["received_across_hosts"] < local["received"]
    assert auto["needed"] < local["needed"], "four times the state per device"
    assert auto["step_s"] == pytest.approx(auto["update_s"] + auto["rollout_s"])
    assert found["rollout_step"]["rollout_s"] == auto["rollout_s"], "the configuration has mesh_shape auto"
    assert "trainer.mesh_shape" in text and "of it across hosts" in text


@pytest.mark.nightly
def test_the_sizes_that_used_to_fail_work(cache):
    """100 prompts × 4,096 tokens with a prefill of 8,192 tokens: our blocks compile, or it is refused with advice."""
    code, text, found = plan(
        "--config_path", f"config/{SAMPLER}_real.yaml", "--topology", "v5p-16", "--engine.max_prefill_size", "8192",
        cache=cache,
    )  # fmt: skip
    print(text)
    assert code == 0, text
    sizes = found["sampling"]["sampling"]["sizes"]
    assert sizes["sequences"] >= 50 and sizes["prefill_rows"] * sizes["page_size"] >= 2048


@pytest.mark.nightly
@pytest.mark.parametrize("slice_", ["v5p-512", "v6e-256"])
def test_big_slices(slice_, cache):
    code, text, found = plan(
        "--config_path", "config/simpo_ultrafeedback_llama3_8b_v5p_64_inference.yaml", "--topology", slice_,
        "--trainer.distributed.require_process_count", "64", "--trainer.per_device_parallelism", "1", cache=cache,
    )  # fmt: skip
    print(text)
    assert found["topology"]["hosts"] == 64
    assert code == 0, text
