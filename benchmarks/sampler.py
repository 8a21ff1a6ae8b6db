"""Measures ``lockstep sample`` on 2 × 2 devices in both modes, beside a loop over Levanter's engine on one host.

All read the same random checkpoint and answer the same prompts of mixed lengths, every answer equally long. Seconds are
those of the whole command: start, load, compile, generate, write.

    python -m benchmarks.sampler --quick --json out.json
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.workers import run_command, write_json

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "data" / "demo" / "tokenizer"
MODES = ("global_mesh", "host_data_parallel")
LEVANTER_BATCH = 64
"""Prompts of one call of its engine, which takes no more than it has slots."""


def main() -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="48 prompts and 32 new tokens, not 1,000 and 64")
    parser.add_argument("--prompts", type=int, help="another number of prompts")
    parser.add_argument("--only", choices=[*MODES, "levanter"], action="append", help="leave the others out")
    parser.add_argument("--json", type=Path, help="write one key per row to this file")
    parser.add_argument("--levanter", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.levanter:
        return levanter(arguments.levanter)
    prompts, new_tokens = (48, 32) if arguments.quick else (1000, 64)
    rows = measure(arguments.prompts or prompts, new_tokens, arguments.only or [*MODES, "levanter"])
    show(rows)
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def measure(prompts: int, new_tokens: int, contestants: list[str]) -> dict[str, Any]:
    """One run of each, in turn."""
    rows: dict[str, Any] = {"prompts": prompts, "new_tokens": new_tokens}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        directory = Path(name)
        write_checkpoint(directory / "checkpoint")
        rng = np.random.default_rng(0)
        lines = [{"prompt": "What is 12 plus 7? " * int(rng.integers(1, 25))} for _ in range(prompts)]
        (directory / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for contestant in contestants:
            seconds, rate = _run(contestant, directory, new_tokens)
            rows[f"{contestant}_total_s"] = seconds
            rows[f"{contestant}_new_tokens_per_s"] = rate
            rows[f"{contestant}_new_tokens_per_s_in_all"] = prompts * new_tokens / seconds
    for mode in MODES:
        if f"{mode}_total_s" in rows and "levanter_total_s" in rows:
            rows[f"{mode}_vs_levanter_total"] = rows["levanter_total_s"] / rows[f"{mode}_total_s"]
            rows[f"{mode}_vs_levanter_rate"] = rows[f"{mode}_new_tokens_per_s"] / rows["levanter_new_tokens_per_s"]
    return rows


def _run(contestant: str, directory: Path, new_tokens: int) -> tuple[float, float]:
    """Seconds of the whole command, and new tokens per second of its generating alone."""
    config = {
        "hf_checkpoint": str(directory / "checkpoint"),
        "trainer": {"log_dir": str(directory), "run_id": contestant, "tracker": {"type": "jsonl"}},
        "prompts": str(directory / "prompts.jsonl"),
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "skip_samples_table": True,
    }
    path = directory / f"{contestant}.yaml"
    if contestant == "levanter":
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "benchmarks.sampler", "--levanter", str(path)]
    else:
        path.write_text(yaml.safe_dump({**config, "inference_mode": contestant}))
        command = [sys.executable, "infra/launch.py", "--backend", "local", "--processes", "2"]
        command += ["--devices_per_process", "2", "--", "lockstep", "sample", "--config_path", str(path)]
    # No programs from earlier runs: compiling is part of it.
    environment = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    start = time.perf_counter()
    output = run_command(command, environment)
    seconds = time.perf_counter() - start
    if contestant == "levanter":
        return seconds, float(output.rpartition("rate ")[2])
    last = json.loads((directory / contestant / "metrics.jsonl").read_text().splitlines()[-1])
    return seconds, float(last["sample/tokens_per_second"])


def write_checkpoint(path: Path) -> None:
    """The random Llama of the benchmarks with the demo's tokenizer."""
    import jax
    from jax.sharding import Mesh

    from benchmarks.shapes import MODEL, random_weights
    from lockstep.models import as_trainable, save_hf
    from lockstep.text import load_tokenizer

    weights = random_weights(Mesh(np.array(jax.devices()[:1]), ("fsdp",)))
    save_hf(as_trainable(MODEL, weights), path, tokenizer=load_tokenizer(TOKENIZER))


def levanter(config_path: Path) -> int:
    """A loop over Levanter's engine, on one device: batches of prompts, padded sizes for the longest of all."""
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
    from levanter.inference.jit_scheduler import SeqDecodingParams
    from levanter.layers.attention import AttentionBackend
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    from lockstep.text import encode, load_tokenizer, read_prompts

    config = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    new_tokens = config["max_new_tokens"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    with jax.set_mesh(mesh), hax.axis_mapping({}):
        converter = LlamaConfig(tokenizer=str(TOKENIZER)).hf_checkpoint_converter(config["hf_checkpoint"])
        loaded = converter.config_from_hf_config(converter.hf_config_from_hf_checkpoint(config["hf_checkpoint"]))
        model = converter.load_pretrained(
            LlamaLMHeadModel,
            ref=config["hf_checkpoint"],
            config=dataclasses.replace(loaded, attn_backend=AttentionBackend.VANILLA),
            dtype=jnp.float32,
        )
        tokens = encode(load_tokenizer(TOKENIZER), read_prompts(config["prompts"]))
        longest = max(map(len, tokens))
        batch = min(LEVANTER_BATCH, len(tokens))
        options = InferenceEngineConfig(
            max_seq_len=longest + new_tokens,
            max_pages=batch * math.ceil((longest + new_tokens) / 16),
            page_size=16,
            max_seqs=batch,
            max_seqs_in_prefill=batch,
            max_prefill_size=batch * longest,
            max_queued_tokens=max(512, batch),
            max_rounds=64,
            compute_dtype=jnp.float32,
        )
        engine = InferenceEngine.from_model_with_config(model, tokenizer=None, config=options, axis_resources={})
        start, made = time.perf_counter(), 0
        for first in range(0, len(tokens), batch):
            requests = [
                Request(
                    prompt_tokens=list(each),
                    request_id=number,
                    decode_params=dataclasses.replace(
                        SeqDecodingParams.default(), max_num_tokens=jnp.array(len(each) + new_tokens, jnp.int32)
                    ),
                    n_generations=1,
                )
                for number, each in enumerate(tokens[first : first + batch])
            ]
            result = engine.generate(requests)
            made += sum(map(len, result.tokens))
    seconds = time.perf_counter() - start
    short = len(tokens) * new_tokens
    assert made in (short, short + sum(map(len, tokens))), (made, short)
    print(f"rate {short / seconds}")
    return 0


def show(rows: dict[str, Any]) -> None:
    """All rows."""
    table = Table(title=f"sampler benchmark: {rows['prompts']} prompts, {rows['new_tokens']} new tokens each")
    table.add_column("row")
    table.add_column("measured", justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
