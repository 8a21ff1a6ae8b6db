"""The rounds of samples of the self-test: one layout after the other, and one that fails on one host."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jax.sharding import Mesh

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.engine import layout_text
from lockstep.hosts import Hosts, current
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder, register_reader
from lockstep.placement import PP, tensor_sizes
from lockstep.training import StepInfo, TokenizedRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TEXT: Final = """\
A model on a pod is in pieces, one on each chip, and no host has all of it. So every host takes part in every answer: \
they wait for each other, hear the same question, run the same programs in the same order, and wait for each other \
again. Then one of them writes down what was said, and training goes on as if nothing had happened.
"""
"""The text that the model learns by heart; each character is a token."""
PROMPTS: Final = ("A model on a pod ", "every host", "the same", "T")
LENGTH: Final = 64  # the tokens of a row
_SPECIAL: Final = ("<end>", "<unknown>")


def make_tokenizer() -> "PreTrainedTokenizerBase":
    """A tokenizer whose tokens are the characters of `TEXT`, the same on every host."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIAL, *sorted(set(TEXT))]
    # Byte-pair encoding without merges: every character by itself.
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=_SPECIAL[1]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_SPECIAL[0], unk_token=_SPECIAL[1])


def make_rows(tokenizer: "PreTrainedTokenizerBase", count: int) -> TokenizedRows:
    """Windows of the text."""
    text = np.array(tokenizer.encode(TEXT), np.int32)
    starts = np.random.default_rng(0).integers(0, len(text), count)
    tokens = np.stack([np.take(text, np.arange(start, start + LENGTH), mode="wrap") for start in starts])
    return TokenizedRows(columns={"tokens": tokens, "loss_mask": np.ones_like(tokens, bool)}, seed=0)


def shape_for(mesh: Mesh) -> LlamaConfig:
    """A small shape whose axes the mesh divides, in training and in every layout of decoding."""
    cpu = mesh.devices.flat[0].platform == "cpu"
    head, width = (16, 32) if cpu else (128, 256)  # 128: what the TPU's attention kernel reads at once
    hidden, kv_heads = math.lcm(width, mesh.shape["fsdp"]), math.lcm(2, mesh.shape["tp"])
    # Few kv heads, so that layouts of more devices repeat them; where their numbers do not nest, one for each device.
    if any(size % kv_heads and kv_heads % size for size in tensor_sizes(mesh)):
        kv_heads = mesh.size
    return LlamaConfig(
        max_seq_len=2 * LENGTH,
        hidden_dim=hidden,
        intermediate_dim=math.lcm(2 * hidden, mesh.size),
        num_layers=math.lcm(2, mesh.shape.get(PP, 1)),
        num_heads=math.lcm(2 * kv_heads, mesh.size),
        num_kv_heads=kv_heads,
        head_dim=head,
        gradient_checkpointing=False,
        initializer_range=0.1,
    )


INJECTED: Final = "injected by the self-test on the last process, to see that all skip the round"
NEW_TOKENS: Final = 16

type Layout = dict[str, int] | str


@dataclasses.dataclass(frozen=True)
class UnreadableOnLastHost:
    """A model that the last process cannot read."""

    model: Any


@register_reader(UnreadableOnLastHost)
def _read(model: UnreadableOnLastHost) -> tuple[LlamaConfig, DecoderWeights]:
    hosts = current()
    if hosts.index == hosts.count - 1:
        raise OSError(INJECTED)
    return read_decoder(model.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """The outcome of a layout."""

    layout: str
    state: str  # `tested`, `auto` where it is the one that `auto` chose, `late` where there was no time for it
    rounds: int = 0
    traces: tuple[int, ...] = ()  # how often each of its programs was traced
    seconds: float = 0.0  # seconds of the first round, compiling among them
    gap: float = float("inf")  # the largest difference to a log-probability of training, in nats
    mean_gap: float = 0.0
    mean_noise: float = 0.0  # the mean difference that rounding makes, in nats; 0 where the engine computes in float32
    answers: tuple[str, ...] = ()  # the texts of the last round


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Info:
    step: int
    model: Any


class _Numbers:
    """A tracker that keeps the numbers of all rounds."""

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, float | str]] = {}

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        self.rounds.setdefault(step, {}).update({name.partition("/")[2]: value for name, value in metrics.items()})

    def log_rows(self, name: str, rows: Sequence[Any], *, step: int) -> None:
        """Drop the rows: they are in a file."""

    def finish(self) -> None:
        """Do nothing."""

    def largest(self, name: str, default: float) -> float:
        """The largest value of a number in any round."""
        return max((float(numbers[name]) for numbers in self.rounds.values() if name in numbers), default=default)


class LayoutRounds:
    """A hook of the trainer that samples: a failure after step 1, then a layout after each step, at last all of them.

    Args:
        deadline: The time (`time.monotonic`) on the leader after which no other layout is begun.
    """

    def __init__(self, hosts: Hosts, layouts: Sequence[Layout], dtype: str, directory: Path, deadline: float) -> None:
        self._hosts, self._deadline, self._directory = hosts, deadline, directory
        self._tokenizer, self._dtype = make_tokenizer(), dtype
        self.layouts = [layout_text(layout) for layout in layouts]
        self.steps = len(layouts) + 3
        """The steps of training that it is made for: one more than those after which there is a round."""
        self.failing = self._callback("failure")
        self._numbers = {layout: _Numbers() for layout in self.layouts}
        self._callbacks = {
            layout_text(layout): self._callback(
                layout_text(layout),
                tracker=self._numbers[layout_text(layout)],
                layout=layout,
                on_error="raise",
                audit=True,
            )
            for layout in layouts
        }
        self._states: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    def _callback(self, name: str, tracker: _Numbers | None = None, **values: Any) -> SampleCallback:
        config = InferenceEvalConfig(
            prompts=list(PROMPTS),
            eval_every=1,
            max_new_tokens=NEW_TOKENS,
            n_generations=2,
            temperature=0.8,
            top_p=0.9,
            timeout_s=self._hosts.timeout_s,
            skip_samples_table=True,
            **values,
        )
        return SampleCallback(
            config,
            self._tokenizer,
            tracker=tracker,
            name=f"self-test, {name}",
            output_dir=self._directory / name,
            hosts=self._hosts,
            dtype=self._dtype,
        )

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        """Make the rounds of a step; every host calls it. There is none where it is forced, at the end."""
        step = info.next_step
        if force or step in (0, self.steps):
            return
        if step == 1:
            self.failing(_Info(step=step, model=UnreadableOnLastHost(info.model)))
        elif step < self.steps - 1:
            self._first_round(self.layouts[step - 2], info)
        else:
            for layout, state in self._states.items():
                if state == "tested":
                    self._callbacks[layout](_Info(step=step, model=info.model))

    def _first_round(self, layout: str, info: StepInfo) -> None:
        engine = self._callbacks["auto"].engine
        if engine is not None and engine.sizing is not None and layout == layout_text(engine.sizing.layout):
            self._states[layout] = "auto"
            return
        with self._hosts.run_on_all(f"self-test: time left after step {info.next_step}") as phase:
            phase.share(time.monotonic() < self._deadline)
        if not phase.shared[0]:  # by the leader's clock
            self._states[layout] = "late"
            return
        begin = time.monotonic()
        self._callbacks[layout](_Info(step=info.next_step, model=info.model))
        self._states[layout], self._seconds[layout] = "tested", time.monotonic() - begin

    def finish(self) -> None:
        """Wait for the reports of all rounds; every host calls it."""
        for callback in [*self._callbacks.values(), self.failing]:
            callback.finish()

    def results(self) -> list[LayoutResult]:
        """The outcome of each layout; call it on the leader after `finish`."""
        return [self._result(layout, state) for layout, state in self._states.items()]

    def _result(self, layout: str, state: str) -> LayoutResult:
        if state != "tested":
            return LayoutResult(layout=layout, state=state)
        callback, numbers = self._callbacks[layout], self._numbers[layout]
        programs = callback.engine.programs.values() if callback.engine else ()
        lines = (self._directory / layout / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return LayoutResult(
            layout=layout,
            state=state,
            rounds=callback.rounds,
            traces=tuple(program.traces for program in programs),
            seconds=self._seconds[layout],
            gap=numbers.largest("logprob_gap", float("inf")),
            mean_gap=numbers.largest("logprob_gap_mean", float("inf")),
            mean_noise=numbers.largest("logprob_noise_mean", 0.0),
            answers=tuple(row["generated_text"] for row in rows if row["step"] == self.steps - 1),
        )
