"""Train with and without samples on the devices that are there: the safety suite of the repository, where it matters.

One training run is made twice, once plain and once with samples between its steps. After step 1 the round fails on the
last host, which cannot read the model. After each of the next steps there is a round in one layout, so that a loss that
differs says after which. After the last step but one, all layouts answer again, from the same weights.
"""

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import haliax as hax
import jax
from jax.sharding import Mesh

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.device import used_bytes
from lockstep.doctor.finding import Finding
from lockstep.doctor.text_model import PROMPTS, make_rows, make_tokenizer, shape_for
from lockstep.engine import layout_text
from lockstep.errors import HostError
from lockstep.hosts import Hosts, current
from lockstep.models import (
    DecoderWeights,
    LlamaConfig,
    LlamaLMHeadModel,
    padded_vocab_size,
    read_decoder,
    register_reader,
)
from lockstep.placement import data_shards, make_mesh, tensor_sizes
from lockstep.training import OptimizerConfig, StepInfo, Trainer, TrainerConfig, lm_loss

GAP: Final = 1e-3
"""Nats between the engine's log-probabilities and those of the training forward that float32 explains."""
WRONG_GAP: Final = 0.5
"""Nats that no rounding explains."""
NEW_TOKENS: Final = 16
INJECTED: Final = "injected by the self-test on the last process, to see that all skip the round"

type Layout = dict[str, int] | str


@dataclasses.dataclass(frozen=True)
class _UnreadableOnLastHost:
    """A model that the last process cannot read."""

    model: Any


@register_reader(_UnreadableOnLastHost)
def _read(model: _UnreadableOnLastHost) -> tuple[LlamaConfig, DecoderWeights]:
    hosts = current()
    if hosts.index == hosts.count - 1:
        raise OSError(INJECTED)
    return read_decoder(model.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Info:
    step: int
    model: Any


class _Numbers:
    """A tracker that keeps the numbers of each round."""

    def __init__(self) -> None:
        self.rounds: dict[int, dict[str, Any]] = {}

    def log(self, metrics: Mapping[str, float | str], *, step: int) -> None:
        self.rounds.setdefault(step, {}).update({name.rpartition("/")[2]: value for name, value in metrics.items()})
        self.rounds[step].update({name: value for name, value in metrics.items() if "/hbm/" in name})

    def log_rows(self, name: str, rows: Sequence[Any], *, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class _Samples:
    """The callbacks of one run: one for each layout, and one for the failure.

    Args:
        hosts: The processes of the job.
        layouts: The layouts.
        dtype: The float type to decode in.
        directory: Where the leader writes what was said.
        deadline: The time (`time.monotonic`) after which no other layout is begun.
    """

    def __init__(self, hosts: Hosts, layouts: Sequence[Layout], dtype: str, directory: Path, deadline: float) -> None:
        self._hosts, self._deadline = hosts, deadline
        tokenizer = make_tokenizer()
        common: dict[str, Any] = {
            "prompts": list(PROMPTS),
            "eval_every": 1,
            "max_new_tokens": NEW_TOKENS,
            "n_generations": 2,
            "temperature": 0.8,
            "top_p": 0.9,
            "timeout_s": hosts.timeout_s,
            "skip_samples_table": True,
        }
        self.numbers = {layout_text(layout): _Numbers() for layout in layouts}
        self.callbacks = {
            layout_text(layout): SampleCallback(
                InferenceEvalConfig(layout=layout, on_error="raise", audit=True, **common),
                tokenizer,
                tracker=self.numbers[layout_text(layout)],
                name=f"self-test {layout_text(layout)}",
                output_dir=directory / str(number),
                hosts=hosts,
                dtype=dtype,
            )
            for number, layout in enumerate(layouts)
        }
        self.failing = SampleCallback(
            InferenceEvalConfig(on_error="skip", **common),
            tokenizer,
            name="self-test failure",
            hosts=hosts,
            dtype=dtype,
        )
        self.steps = len(layouts) + 3
        self.begun: list[str] = []
        self.seconds: dict[str, float] = {}

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        """Make the rounds of a step."""
        step, names = info.next_step, list(self.callbacks)
        if force or step == self.steps:
            return
        if step == 1:
            self.failing(_Info(step=step, model=_UnreadableOnLastHost(info.model)))
        elif step < self.steps - 1:
            name = names[step - 2]
            if self._time_left(step):
                begin = time.monotonic()
                self.callbacks[name](_Info(step=step, model=info.model))
                self.seconds[name] = time.monotonic() - begin
                self.begun.append(name)
        else:
            for name in self.begun:
                self.callbacks[name](_Info(step=step, model=info.model))

    def finish(self) -> None:
        """Wait for the reports of all rounds."""
        for callback in [*self.callbacks.values(), self.failing]:
            callback.finish()

    def _time_left(self, step: int) -> bool:
        """Whether there is time for another layout, by the leader's clock."""
        with self._hosts.run_on_all(f"self-test: time left after step {step}") as phase:
            phase.share(time.monotonic() < self._deadline)
        return bool(phase.shared[0])


def self_test(hosts: Hosts, mesh_shape: str, seconds: float) -> tuple[list[Finding], dict[str, Any]]:
    """Train with and without samples; every process makes the same call.

    Args:
        hosts: The processes of the job.
        mesh_shape: The training mesh.
        seconds: The seconds after which no other layout is begun.

    Returns:
        What was found, the same on every process but for what the leader alone knows, and values for the report.
    """
    what = f"self-test {mesh_shape}"
    begin = time.monotonic()
    try:
        mesh = make_mesh(mesh_shape)
        layouts: list[Layout] = ["auto", "training"]
        layouts += [{"tensor": size} for size in tensor_sizes(dict(mesh.shape))]
        with tempfile.TemporaryDirectory(prefix="lockstep-self-test-") as directory:
            dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
            samples = _Samples(hosts, layouts, dtype, Path(directory), begin + seconds)
            plain = _train(hosts, mesh, samples.steps, dtype, None)
            used = used_bytes()
            sampled = _train(hosts, mesh, samples.steps, dtype, samples)
            samples.finish()
            with hosts.run_on_all(f"{what}: the same everywhere") as phase:
                phase.agree({"losses": " ".join(sampled.losses), "launches": hosts.ledger.state})
            findings = [
                _losses(what, plain, sampled, list(samples.callbacks)),
                _failure(what, samples.failing, hosts.count),
                *_layouts(what, samples, Path(directory), is_leader=hosts.is_leader),
                _memory(what, used, used_bytes()),
            ]
    except HostError as error:
        if not error.on_every_process:
            raise
        fix = "Send this report, and the logs of all processes, to the issues of the project."
        return [Finding.to_fix(what, f"{type(error).__name__}: {error}", fix)], {}
    done = Finding.ok(
        f"{what}: launches", f"{hosts.ledger.count} launches so far, the same in the same order on every process"
    )
    values = {
        "losses": plain.losses,
        "losses with samples": sampled.losses,
        "seconds": time.monotonic() - begin,
        "seconds of a first round": samples.seconds,
        "numbers of rounds": {name: one.rounds for name, one in samples.numbers.items()},
    }
    return [*findings, done], {what: values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """How a run went: the losses as hexadecimal digits, and how often the train step was traced."""

    losses: list[str]
    traces: int


def _train(hosts: Hosts, mesh: Mesh, steps: int, dtype: str, samples: _Samples | None) -> _Run:
    tokenizer = make_tokenizer()
    batch_size = 2 * data_shards(mesh)
    precision = "p=f32" if dtype == "float32" else "p=f32,c=bf16"
    config = TrainerConfig(num_train_steps=steps, train_batch_size=batch_size, mp=precision)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0)
    trainer = Trainer(config, optimizer.build(steps), lm_loss, hosts, mesh=mesh)
    vocab = hax.Axis("vocab", padded_vocab_size(len(tokenizer), mesh.shape["tp"]))
    shape = shape_for(mesh)
    losses: list[str] = []
    trainer.add_hook(lambda info: losses.append(float(info.loss).hex()) if len(losses) < info.next_step else None)
    if samples is not None:
        trainer.add_hook(samples)
    model = trainer.init_model(functools.partial(_init, vocab, shape))
    trainer.train(model, make_rows(tokenizer, 4 * batch_size))
    return _Run(losses=losses, traces=trainer.train_step_traces)


def _init(vocab: hax.Axis, shape: LlamaConfig, key: jax.Array) -> LlamaLMHeadModel:
    return LlamaLMHeadModel.init(vocab, shape, key=key)


def _losses(what: str, plain: _Run, sampled: _Run, layouts: Sequence[str]) -> Finding:
    """Whether training went on as if there were no samples."""
    name = f"{what}: losses"
    report = "Sampling has changed training. Send this report to the issues of the project."
    if plain.losses != sampled.losses:
        first = next(i for i, pair in enumerate(zip(plain.losses, sampled.losses, strict=True)) if pair[0] != pair[1])
        before = "nothing" if first == 0 else "the injected failure"
        if first >= 2:
            before = f"the round in layout {layouts[min(first, len(layouts) + 1) - 2]}"
        values = [float.fromhex(run.losses[first]) for run in (plain, sampled)]
        return Finding.to_fix(
            name, f"step {first + 1}, after {before}, has loss {values[1]!r} and without samples {values[0]!r}.", report
        )
    if (plain.traces, sampled.traces) != (1, 1):
        text = f"the train step was traced {sampled.traces} times with samples and {plain.traces} times without."
        return Finding.to_fix(name, text, report)
    first_loss, last_loss = (float.fromhex(plain.losses[i]) for i in (0, -1))
    return Finding.ok(
        name,
        f"{len(plain.losses)} losses are equal bit for bit with and without samples ({first_loss:.3f} to "
        f"{last_loss:.3f}); the train step was compiled once in each run",
    )


def _failure(what: str, failing: SampleCallback, count: int) -> Finding:
    """Whether the injected failure was skipped."""
    name = f"{what}: failure on one host"
    if (failing.rounds, failing.skipped_rounds) == (0, 1):
        return Finding.ok(name, f"the round was skipped on all {count} processes, and training went on")
    text = f"{failing.rounds} rounds were made and {failing.skipped_rounds} skipped; expected were 0 and 1."
    return Finding.to_fix(name, text, "Send this report to the issues of the project.")


def _layouts(what: str, samples: _Samples, directory: Path, *, is_leader: bool) -> list[Finding]:
    """Whether each layout answered as the model does, and all of them the same from the same weights."""
    findings = []
    answers: dict[str, list[str]] = {}
    for number, (name, callback) in enumerate(samples.callbacks.items()):
        title = f"{what}: layout {name}"
        if name not in samples.begun:
            fix = "Raise self_test_s."
            findings.append(Finding.warning(title, "not tested: the time of the self-test was over.", fix))
            continue
        traces = {program.traces for program in callback.engine.programs.values()} if callback.engine else set()
        if callback.rounds != 2 or traces != {1}:
            text = f"{callback.rounds} rounds of 2; programs were traced {sorted(traces)} times, expected was once."
            findings.append(Finding.to_fix(title, text, "Send this report to the issues of the project."))
            continue
        if is_leader:
            findings.append(_audited(title, samples.numbers[name].rounds, samples.seconds[name]))
            rows = (directory / str(number) / "samples.jsonl").read_text(encoding="utf-8").splitlines()
            last = [json.loads(row) for row in rows]
            answers[name] = [row["generated_text"] for row in last if row["step"] == samples.steps - 1]
    if answers:
        findings.append(_same_answers(what, answers))
    return findings


def _audited(title: str, rounds: Mapping[int, Mapping[str, Any]], seconds: float) -> Finding:
    """Whether the engine's log-probabilities are those of the training forward."""
    gap = max((float(one["logprob_gap"]) for one in rounds.values() if "logprob_gap" in one), default=float("inf"))
    noise = max((float(one.get("logprob_noise", 0.0)) for one in rounds.values()), default=0.0)
    text = f"2 rounds, the first in {seconds:.1f} s; log-probabilities differ from the training forward by {gap:.2g}"
    text += f", of which rounding explains {2 * noise:.2g}" if noise else ""
    if gap <= max(GAP, 2 * noise):
        return Finding.ok(title, text)
    fix = "Send this report to the issues of the project."
    return (Finding.to_fix if gap > WRONG_GAP else Finding.warning)(title, f"{text}.", fix)


def _same_answers(what: str, answers: Mapping[str, Sequence[str]]) -> Finding:
    """Whether all layouts say the same from the same weights and seeds."""
    name = f"{what}: answers"
    first, *others = answers.values()
    different = {
        layout: sum(one != two for one, two in zip(first, texts, strict=True))
        for layout, texts in zip(list(answers)[1:], others, strict=True)
    }
    if not any(different.values()):
        return Finding.ok(name, f"{len(answers)} layouts give the same {len(first)} answers from the same weights")
    listed = ", ".join(f"{number} in {layout}" for layout, number in different.items() if number)
    text = f"of {len(first)} answers, these differ from those of layout {next(iter(answers))}: {listed}."
    return Finding.warning(
        name, text, "A few are near-ties that rounding decides; many are a mistake: send this report."
    )


def _memory(what: str, before: int | None, after: int | None) -> Finding:
    """Whether samples have left device memory in use."""
    name = f"{what}: memory"
    if before is None or after is None:
        return Finding.ok(name, "not counted on this device")
    if after <= before:
        return Finding.ok(name, f"{after} bytes in use after the run with samples, {before} after the one without")
    text = f"{after} bytes in use after the run with samples, {before} after the one without."
    return Finding.warning(name, text, "Send this report to the issues of the project.")
