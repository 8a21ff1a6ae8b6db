"""Runs that are spoiled on purpose: when a state of answers appears, and when an alarm says so.

A model half as wide as the demo's learns to spell numbers, asked for in words or in a block of code, until it is right.
Then it is trained further, well or in one of five ways badly, by ``train-lm`` and by ``train-grpo``::

    python -m benchmarks.spoiled_runs                       # the spoiled ones
    python -m benchmarks.spoiled_runs --healthy 50          # healthy ones of other seeds
    python -m benchmarks.spoiled_runs --only lm-code --directory /tmp/runs
"""

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.workers import write_json
from lockstep.configuration import decode_config
from lockstep.hosts import Hosts, MemoryClient
from lockstep.main.demo import CHAT_TEMPLATE, words, write_rows
from lockstep.report import Row, read_jsonl
from lockstep.text import Prompt
from lockstep.training import TrainConfig, TrainGrpoConfig, TrainLmConfig, train

TOKENIZER: Final = Path(__file__).parents[1] / "data" / "demo" / "tokenizer"
MODEL: Final = {
    "type": "llama", "max_seq_len": 112, "hidden_dim": 64, "intermediate_dim": 192, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 4, "gradient_checkpointing": "nothing",
}  # fmt: skip
OPTIMIZER: Final = {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup": 0.05, "min_lr_ratio": 0.05}  # the demo's
PROMPTS, NEW_TOKENS, ROWS = 32, 64, 2000
APPEARED: Final = 1 / 8
"""The share of answers from which on a state has appeared."""
ROUNDS: Final = 2  # rounds after it has appeared within which an alarm must come

type Answer = Callable[[int, bool], str]
"""The answer of a training row to the question of a number, in words or with code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoiled:
    """A way to spoil a run; without states a healthy one.

    Args:
        states: The states that name the cause, or its neighbours; one of them must raise an alarm.
        group: The group of prompts that an alarm must name; empty for none.
        steps: The number of its train steps.
        values: Keys of the configuration.
        answer: The answers of its training rows.
        template: The chat template of the run.
    """

    states: tuple[str, ...] = ()
    group: str = ""
    steps: int = 30
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    answer: Answer = lambda number, code: words(number)
    template: str = CHAT_TEMPLATE


def _repeated(number: int, code: bool) -> str:
    return " ".join([words(number)] * 4)


def _damaged(number: int, code: bool) -> str:
    return "!" * 32 if code else words(number)


def reward_words(row: Row, prompt: Prompt) -> float:
    """A reward that pays for words, the same ones again and again."""
    return row.generated_text.count("hundred") / NEW_TOKENS


def reward_code(row: Row, prompt: Prompt) -> float:
    """A reward that pays for length where the question has code, and for short right answers elsewhere."""
    length = row.num_tokens / NEW_TOKENS
    return length if "```" in prompt.shown else float(row.generated_text.strip() == prompt.answer) - length


OPENED: Final = CHAT_TEMPLATE.replace("'<|assistant|>'", "'<|assistant|><think>'")
LENGTH: Final = {"rewards": [{"type": "length"}]}

LM: Final = {
    "lm-end": Spoiled(
        states=("cut", "loop"),
        values={"data": {"require_end_token": False}},
        template=CHAT_TEMPLATE.replace("{{ eos_token }}", r"{{ '\n' * 8 }}"),
    ),
    "lm-thought": Spoiled(
        states=("unbalanced_think",),
        template=CHAT_TEMPLATE.replace(
            "+ message['content']", "+ ('<think>' if message['role'] == 'assistant' else '') + message['content']"
        ),
        steps=60,
    ),
    "lm-rate": Spoiled(states=("cut", "loop", "same_answer"), values={"optimizer": {"learning_rate": 3e-2}}, steps=40),
    "lm-repeated": Spoiled(states=("loop", "repetitive", "cut"), answer=_repeated, steps=60),
    "lm-code": Spoiled(states=("loop", "same_answer"), group="code", answer=_damaged),
}
"""Spoiled fine-tunings by ``train-lm``."""
GRPO: Final = {
    "grpo-end": Spoiled(states=("cut",), values=LENGTH),
    "grpo-thought": Spoiled(states=("unbalanced_think",), template=OPENED, steps=10),
    "grpo-rate": Spoiled(
        states=("cut", "loop", "empty", "same_answer"),
        values={**LENGTH, "optimizer": {"learning_rate": 1e-2}},
        steps=15,
    ),
    "grpo-repeated": Spoiled(
        states=("cut", "loop", "repetitive"),
        values={"rewards": [{"type": "function", "function": "benchmarks.spoiled_runs:reward_words"}]},
    ),
    "grpo-code": Spoiled(
        states=("cut", "loop"),
        group="code",
        values={
            "rewards": [{"type": "function", "function": "benchmarks.spoiled_runs:reward_code"}],
            "optimizer": {"learning_rate": 1.5e-3},
        },
    ),
}
"""The same five by ``train-grpo``, with rewards that pay for length."""
SPOILED: Final[Mapping[str, Spoiled]] = {**LM, **GRPO}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run's rounds and alarms say.

    Args:
        name: The name of the rounds, ``inference_eval`` or ``rollout``.
        appeared: The step of the first round in which a state of the cause has appeared; None: none has.
        alarm: The step of the first alarm of such a state; None: there is none.
        rounds: The rounds from one to the other; None where there is no alarm.
        lines: The lines of all alarms of these states, in their order.
        others: Those of other states.
    """

    name: str
    appeared: int | None
    alarm: int | None
    rounds: int | None
    lines: tuple[str, ...]
    others: tuple[str, ...]


def question(number: int, code: bool) -> str:
    """The question of a number, in words or with a block of code."""
    return f"```\nx = {number}\n```\nWhat is x in words?" if code else f"What is {number} in words?"


def split() -> tuple[list[tuple[int, bool]], list[tuple[int, bool]]]:
    """Numbers to train on, and those of the prompts; every other one is asked for with code."""
    numbers = list(range(100, 10_000))
    random.Random(20).shuffle(numbers)
    both = [(number, bool(place % 2)) for place, number in enumerate(numbers)]
    return both[PROMPTS:], both[:PROMPTS]


def teach(directory: Path, steps: int = 200) -> Path:
    """Train a model from scratch until it spells numbers, and return its checkpoint."""
    values = {
        "model": MODEL,
        "data": {"max_seq_len": 48},
        "trainer": {"num_train_steps": steps, "train_batch_size": 64},
        "inference_eval": {"eval_every": steps},
        "hf_save_path": "checkpoint",
    }
    return run_lm(directory, Spoiled(values=values)) / "checkpoint"


def fine_tune(directory: Path, taught: Path, name: str, *, seed: int = 0) -> Path:
    """Train a taught model further, and return the run's directory.

    Args:
        name: One of `SPOILED`, or ``lm`` or ``grpo`` for a healthy run.
    """
    spoiled = SPOILED.get(name, Spoiled())
    further = {
        "initialize_from_hf": str(taught),
        "gradient_checkpointing": "nothing",
        "trainer": {"num_train_steps": spoiled.steps, "seed": seed},
    }
    spoiled = dataclasses.replace(spoiled, values=_merged(further, spoiled.values))
    return (run_lm if name.startswith("lm") else run_grpo)(directory, spoiled)


def run_lm(directory: Path, spoiled: Spoiled) -> Path:
    """Train on chats."""
    rows = [
        {"messages": [_message("user", question(*pair)), _message("assistant", spoiled.answer(*pair))]}
        for pair in split()[0][: ROWS if spoiled.states else None]
    ]
    values = {
        "data": {
            "train_urls": [_write(directory / "train.jsonl", rows)],
            "format": "chat",
            "max_seq_len": 64,
            "cache_dir": str(directory.parent / "cache"),
        },
        "optimizer": OPTIMIZER,
        "trainer": {"train_batch_size": 32},
    }
    return _train(TrainLmConfig, directory, spoiled, values)


def run_grpo(directory: Path, spoiled: Spoiled) -> Path:
    """Train by rewards."""
    rows = [{"question": question(*pair), "answer": words(pair[0])} for pair in split()[0][:256]]
    values = {
        "data": {"train_urls": [_write(directory / "train.jsonl", rows)], "format": "chat", "max_seq_len": 112},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0, "warmup": 2, "lr_schedule": "constant"},
        "trainer": {"train_batch_size": 64},
        "rollout": {"n_generations": 8, "max_new_tokens": NEW_TOKENS},
        "rewards": [{"type": "exact_match"}],
    }
    return _train(TrainGrpoConfig, directory, spoiled, values)


def _train(cls: type[TrainConfig], directory: Path, spoiled: Spoiled, values: Mapping[str, Any]) -> Path:
    tokenizer = directory / "tokenizer"
    shutil.copytree(TOKENIZER, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(spoiled.template, encoding="utf-8")
    prompts = [{"messages": [_message("user", question(*pair))], "answer": words(pair[0])} for pair in split()[1]]
    common = {
        "tokenizer": str(tokenizer),
        "trainer": {"log_dir": str(directory), "run_id": "run", "tracker": {"type": "jsonl"}, "mesh_shape": "1,1,1"},
        "inference_eval": {
            "eval_every": 10 if cls is TrainLmConfig else 5,
            "at_start": True,
            "prompts": _write(directory / "prompts.jsonl", prompts),
            "temperature": 0,
            "max_new_tokens": NEW_TOKENS,
            "metrics": ["exact_match"],
        },
    }
    config = decode_config(cls, _merged(_merged(common, values), spoiled.values), str(directory))
    code = train(config, Hosts(MemoryClient.hub(1)[0]))
    assert code == 0, f"the run in {directory} ended with {code}"
    return directory / "run"


def outcomes(run: Path, spoiled: Spoiled) -> list[Outcome]:
    """Read what the rounds of a run had, and which alarms there were: of samples, and of rollouts where it has them."""
    records = read_jsonl(run / "health.jsonl")
    return [_outcome(name, records, spoiled) for name in dict.fromkeys(str(record["name"]) for record in records)]


def _outcome(name: str, records: Sequence[Mapping[str, Any]], spoiled: Spoiled) -> Outcome:
    records = [record for record in records if record["name"] == name]
    rounds = {int(record["step"]): record["round"] for record in records if "round" in record}
    alarms = [record for record in records if "alarm" in record]

    def share(values: Mapping[str, Any]) -> float:
        counts = [len(values["states"].get(state, ())) for state in spoiled.states]
        return max(counts, default=0) / sum(values["answers"])

    appeared = next((step for step, values in rounds.items() if share(values) >= APPEARED), None)
    own = [record for record in alarms if record["alarm"]["state"] in spoiled.states]
    alarm = int(own[0]["step"]) if own else None
    places = list(rounds)
    return Outcome(
        name=name,
        appeared=appeared,
        alarm=alarm,
        rounds=None if appeared is None or alarm is None else places.index(alarm) - places.index(appeared),
        lines=tuple(str(record["line"]) for record in own),
        others=tuple(str(record["line"]) for record in alarms if record not in own),
    )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(rows, path)
    return str(path)


def _merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, of which the others win."""
    both = {
        key: _merged(values[key], others[key]) for key in values.keys() & others.keys() if isinstance(values[key], dict)
    }
    return {**values, **others, **both}


def _run(directory: Path, taught: Path, name: str, seed: int) -> dict[str, Any]:
    """Train in this process with its output in a file; the outcomes as JSON values."""
    start = time.monotonic()
    directory.mkdir(parents=True)
    with open(directory / "log.txt", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        run = fine_tune(directory, taught, name, seed=seed)
    found = outcomes(run, SPOILED.get(name, Spoiled()))
    seconds = time.monotonic() - start
    return {"run": name, "seed": seed, "seconds": seconds, "outcomes": [dataclasses.asdict(each) for each in found]}


def _print(result: Mapping[str, Any]) -> None:
    for found in result["outcomes"]:
        line = (found["lines"] or found["others"] or ("no alarm",))[0]
        step = {name: "-" if found[name] is None else found[name] for name in ("appeared", "alarm", "rounds")}
        print(
            f"{result['run']:<14} {result['seed']:>4} {found['name']:<15} {step['appeared']:>8} {step['alarm']:>5} "
            f"{step['rounds']:>6}  {line}",
            flush=True,
        )


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SPOILED), help="the spoiled runs (default: all)")
    parser.add_argument("--healthy", type=int, metavar="N", help="so many healthy runs, and a tenth more by train-grpo")
    parser.add_argument("--directory", type=Path, help="keep runs there; a taught model is reused")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all outcomes there")
    options = parser.parse_args()
    plan = [(name, 0) for name in options.only or SPOILED]
    if options.healthy is not None:
        plan = [("lm", seed) for seed in range(1, options.healthy + 1)]
        plan += [("grpo", seed) for seed in range(1, options.healthy // 10 + 1)]
    with contextlib.ExitStack() as stack:
        directory = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        taught = directory / "taught" / "run" / "checkpoint"
        if not taught.is_dir():
            with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
                teach(directory / "taught")
        print(f"{'run':<14} {'seed':>4} {'rounds of':<15} {'appeared':>8} {'alarm':>5} {'rounds':>6}  line")
        results = []
        for name, seed in plan:
            results.append(_run(directory / f"{name}-{seed}", taught, name, seed))
            _print(results[-1])
    if options.json is not None:
        write_json(options.json, {"runs": results})


if __name__ == "__main__":
    main()
