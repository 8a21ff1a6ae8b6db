"""A small ``lockstep train-lm`` run with checkpoints and samples, for tests that interrupt it."""

import json

import yaml

EVERY = 3
"""Steps between two checkpoints."""


def write_config(directory, run_id, steps, *, keep=2):
    """Write the configuration of a run of ``steps`` steps and return its path."""
    config = {
        "trainer": {
            "num_train_steps": steps,
            "train_batch_size": 16,
            "log_dir": str(directory),
            "run_id": run_id,
            "checkpointer": {"every": EVERY, "keep": {"newest": keep}},
        },
        "model": {"type": "llama", "max_seq_len": 32, "hidden_dim": 64, "intermediate_dim": 128, "num_layers": 2}
        | {"num_heads": 4, "num_kv_heads": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup": 0.1},
        "tokenizer": "data/demo/tokenizer",
        "data": {"train_urls": ["data/demo/train.jsonl"], "format": "prompt_completion", "max_seq_len": 20},
        "inference_eval": {"eval_every": 7, "prompts": ["What is 12 plus 7?"], "max_new_tokens": 8}
        | {"temperature": 0.9, "n_generations": 2, "on_error": "raise"},
    }
    path = directory / f"{run_id}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def losses(run):
    """Loss by step; each step is in the file once, and a line that a kill has cut off is not one."""
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    found = [(each["step"], each["train/loss"]) for each in map(json.loads, lines) if "train/loss" in each]
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return dict(found)


def checkpoints(run):
    """Steps of the complete checkpoints, in order."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*/metadata.json"))
