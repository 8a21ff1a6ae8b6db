"""One of each piece that a configuration names as ``my_pieces:name``, beside it or on ``PYTHONPATH``.

tests/unit/test_extending.py trains with all of them; docs/extending.md says what each must be.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from lockstep.report import TrackerConfig
from lockstep.text import Prompt
from lockstep.training import DataFormat, PairLosses, PreferenceObjective, RewardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hinge(PreferenceObjective):
    """``objective: {type: "my_pieces:Hinge", margin: 2.0}``."""

    margin: float = 1.0

    def losses(self, pairs):
        """A margin between the mean log-probabilities of the answers, instead of a logistic loss."""
        return PairLosses(jax.nn.relu(self.margin - pairs.mean[:, 0] + pairs.mean[:, 1]), pairs.mean)


def halving(decay):
    """``optimizer: {lr_schedule: "my_pieces:halving"}``: half as much after each step of the decay."""
    return lambda step: jnp.maximum(decay.peak * 0.5**step, decay.last)


def within(scores, nats):
    """``filters: ["my_pieces:within=2.0"]``: tokens whose score is at most so far below the largest."""
    return jnp.max(scores, axis=1) - nats


def as_pair(record):
    """A record of another shape as one of ``format: preference``."""
    prompt = {"role": "user", "content": record["question"]}
    return {
        "chosen": [prompt, {"role": "assistant", "content": record["good"]}],
        "rejected": [prompt, {"role": "assistant", "content": record["bad"]}],
    }


FORMAT = DataFormat.find("preference").converted(as_pair, fields=("question", "good", "bad"))
"""``data: {format: "my_pieces:FORMAT"}``."""


def asked(record):
    """``data: {format: "my_pieces:asked"}`` of ``train-grpo``: a record of another shape as a question."""
    return Prompt(id=0, text=record["question"], answer=record["good"], fields={"bad": record["bad"]})


class Lines:
    """Writes a line of JSON for each call."""

    def __init__(self, path):
        self._file = open(path, "a", encoding="utf-8")  # closed by finish

    def log(self, metrics, *, step):
        """Write figures."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def log_rows(self, name, rows, *, step):
        """Write how many rows there are."""
        self._file.write(json.dumps({"step": step, name: len(rows)}) + "\n")

    def finish(self):
        """Close the file."""
        self._file.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinesConfig(TrackerConfig):
    """``trainer.tracker: {type: "my_pieces:LinesConfig", name: lines.txt}``."""

    name: str

    def build(self, run_dir, run_name, config=None):
        """Open the file below the run directory."""
        return Lines(Path(run_dir) / self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Brevity(RewardConfig):
    """``rewards: [{type: "my_pieces:Brevity", most: 20}]``: 1 for an answer of at most so many characters."""

    most: int

    def build(self, max_new_tokens):
        """Return the function of a row and its prompt."""
        return lambda row, prompt: float(len(row.generated_text) <= self.most)


def in_words(row, prompt):
    """``metrics: ["my_pieces:in_words"]``: 1 for an answer without a digit."""
    return float(not any(map(str.isdigit, row.generated_text)))
