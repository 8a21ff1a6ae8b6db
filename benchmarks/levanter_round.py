"""A round of samples inside a Levanter training run: our hook, and Levanter's own engine called in the same place.

    python -m benchmarks.levanter_round [--json PATH] [--only ours|levanter|plain] [--rounds 4]

2 processes × 2 devices, FSDP, Levanter's ``Trainer``; 8 prompts of 64 tokens, 64 new tokens each, greedy, never stopped
early. The first round compiles. Extra memory is the peak of a process's resident memory during a round less what it had
before; training speed is the median of Levanter's own step times before the first round and after it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from benchmarks.sizes import sized
from benchmarks.workers import report, run_workers, write_json

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, sized(64, 8)
EVERY = 4
CONTESTANTS = ("plain", "ours", "levanter")


def main() -> int:
    """Measure each contestant in a job of its own and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--only", choices=CONTESTANTS, help="measure one contestant")
    parser.add_argument("--worker", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of samples, the first of which compiles")
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, EVERY * arguments.rounds + 1)
    rows: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())
        if "run" in rows:  # whose figures stay where they are not measured anew
            rows["earlier_runs"] = [*rows.get("earlier_runs", []), rows.pop("run")]
    for name in [arguments.only] if arguments.only else CONTESTANTS:
        rows[name] = measure(name, arguments.rounds)
        print(name, json.dumps(rows[name]), flush=True)
    if "ours" in rows and "levanter" in rows:
        rows["later_rounds_over_levanter"] = rows["levanter"]["later_round_s"] / rows["ours"]["later_round_s"]
        rows["first_round_over_levanter"] = rows["levanter"]["first_round_s"] / rows["ours"]["first_round_s"]
        print(f"later rounds {rows['later_rounds_over_levanter']:.1f} × faster than Levanter's engine (goal: 8)")
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Figures of one contestant; memory is that of the process that needed most."""
    found = run_workers("benchmarks.levanter_round", "--worker", name, "--rounds", str(rounds), processes=2, devices=2)
    leader = next(each for each in found if each["process"] == 0)
    steps, seconds = leader["steps"], leader["rounds"]
    figures: dict[str, Any] = {"step_s_before": float(np.median(steps[1:EVERY]))}
    after = [taken for step, taken in enumerate(steps) if step > EVERY and step % EVERY]
    figures["step_s_after"] = float(np.median(after))
    if seconds:
        figures["first_round_s"], figures["later_round_s"] = seconds[0], float(np.median(seconds[1:]))
        figures["rounds_s"] = seconds
        figures["first_round_extra_mb"] = max(each["extra"][0] for each in found) / 2**20
        figures["later_round_extra_mb"] = max(float(np.median(each["extra"][1:])) for each in found) / 2**20
    return figures


def worker(name: str, steps: int) -> int:
    """One process: train, sample in the hook, print what it took."""
    from lockstep.hosts import run_main, start

    def run() -> None:
        hosts = start()
        with tempfile.TemporaryDirectory() as directory:
            figures = train(name, directory, steps)
        report({"process": hosts.index, **figures})

    run_main(run)
    return 0


def train(name: str, directory: str, num_steps: int) -> dict[str, list[float]]:
    """Levanter's loop with one contestant as a hook; seconds of each step and round, bytes of each round."""
    import haliax as hax
    import jax
    import jmp
    from levanter.checkpoint import CheckpointerConfig
    from levanter.data.dataset import ListAsyncDataset
    from levanter.layers.attention import AttentionBackend
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim.config import AdamConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    from lockstep.text import load_tokenizer

    tokenizer = load_tokenizer(ROOT / "data" / "demo" / "tokenizer")
    vocab = -(-len(tokenizer) // 64) * 64
    model = LlamaConfig(
        max_seq_len=PROMPT_TOKENS + NEW_TOKENS,
        hidden_dim=sized(512, 64),
        intermediate_dim=sized(1376, 128),
        num_layers=sized(8, 2),
        num_heads=8,
        num_kv_heads=4,
        attn_backend=AttentionBackend.VANILLA,
    )
    config = TrainerConfig(
        id="bench",
        num_train_steps=num_steps,
        train_batch_size=8,
        tracker=NoopConfig(),
        log_dir=Path(directory),
        checkpointer=CheckpointerConfig(base_path=directory, save_interval=None, keep=None),
        log_jaxprs=False,
        log_xla_hlo=False,
        require_accelerator=False,
        mp=jmp.get_policy("f32"),
    )
    config.initialize()
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(tokenizer), (8 * num_steps, 64)).astype(np.int32)
    data = [LmExample.causal(hax.named(jax.numpy.asarray(row), hax.Axis("position", 64))) for row in rows]
    steps: list[float] = []
    rounds: list[float] = []
    extra: list[float] = []

    def timed(call: Callable[[Any], None]) -> Callable[[Any], None]:
        def hook(info: Any, force: bool = False) -> None:
            if force:
                return
            before = reset_peak()
            start = time.perf_counter()
            call(info)
            rounds.append(time.perf_counter() - start)
            extra.append(float(max(0, peak() - before)))

        return hook

    def loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    with Trainer(config, AdamConfig(learning_rate=1e-4).build(num_steps), loss, add_default_hooks=False) as trainer:
        key = jax.random.PRNGKey(0)
        state = trainer.initial_state(key, model_init=lambda: model.build(hax.Axis("vocab", vocab), key=key))
        trainer.add_hook(lambda info: steps.append(info.step_duration) if len(steps) < num_steps else None)
        if name == "ours":
            trainer.add_hook(timed(our_round(tokenizer, trainer)), every=EVERY)
        if name == "levanter":
            trainer.add_hook(timed(levanter_round(tokenizer, trainer)), every=EVERY)
        trainer.train(state, trainer.data_loader(ListAsyncDataset(data)).iter_from_step(0))
    return {"steps": steps, "rounds": rounds, "extra": extra}


def prompts(tokenizer: Any) -> list[str]:
    """Texts of exactly `PROMPT_TOKENS` tokens."""
    texts = []
    for number in range(PROMPTS):
        ids = tokenizer.encode(f"What is {number} in words? " * PROMPT_TOKENS)[:PROMPT_TOKENS]
        texts.append(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return texts


def our_round(tokenizer: Any, trainer: Any) -> Callable[[Any], None]:
    """Our hook."""
    import lockstep
    import lockstep.levanter

    config = lockstep.InferenceEvalConfig(
        prompts=list(prompts(tokenizer)),
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        at_end=False,
        on_error="raise",
        skip_samples_table=True,
    )
    return lockstep.levanter.sample_callback(config, tokenizer, trainer).on_step


def levanter_round(tokenizer: Any, trainer: Any) -> Callable[[Any], None]:
    """Levanter's engine, made of the model of the step as its own evaluation would."""
    import dataclasses

    import haliax as hax
    import jax.numpy as jnp
    from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
    from levanter.inference.jit_scheduler import SeqDecodingParams

    ids = [tokenizer.encode(text)[:PROMPT_TOKENS] for text in prompts(tokenizer)]
    longest = PROMPT_TOKENS + NEW_TOKENS
    options = InferenceEngineConfig(
        max_seq_len=longest,
        max_pages=PROMPTS * -(-longest // 16),
        page_size=16,
        max_seqs=PROMPTS,
        max_seqs_in_prefill=PROMPTS,
        max_prefill_size=PROMPTS * PROMPT_TOKENS,
        max_queued_tokens=512,
        max_rounds=64,
        compute_dtype=jnp.float32,
    )

    def call(info: Any) -> None:
        mapping = trainer.compute_axis_mapping
        with hax.axis_mapping(mapping):
            engine = InferenceEngine.from_model_with_config(
                info.eval_model, tokenizer=None, config=options, axis_resources=mapping
            )
            limit = jnp.array(longest, jnp.int32)
            params = dataclasses.replace(SeqDecodingParams.default(), max_num_tokens=limit)
            requests = [
                Request(prompt_tokens=list(tokens), request_id=i, decode_params=params, n_generations=1)
                for i, tokens in enumerate(ids)
            ]
            result = engine.generate(requests)
        assert {len(tokens) for tokens in result.tokens} <= {NEW_TOKENS, longest}, [len(t) for t in result.tokens]

    return call


def reset_peak() -> int:
    """Resident bytes of this process now; its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def peak() -> int:
    """Most resident bytes since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
