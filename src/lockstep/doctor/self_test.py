"""Train with and without samples on the devices that are there: the safety suite of the repository, where it matters.

One training run is made twice, plain and with samples between its steps. After step 1 the round fails on the last host,
which cannot read the model. After each of the next steps there is a round in one layout, so that a loss that differs
says after which. After the last step but one, all layouts answer again, from the same weights.
"""

import dataclasses
import gc
import itertools
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import haliax as hax
from jax.sharding import Mesh

from lockstep.doctor.finding import Finding, failed
from lockstep.doctor.layout_rounds import Layout, LayoutResult, LayoutRounds, make_rows, make_tokenizer, shape_for
from lockstep.engine import Engine, EngineConfig, audit, layout_text
from lockstep.errors import HostError
from lockstep.hosts import Hosts
from lockstep.json_text import from_peer
from lockstep.models import LlamaLMHeadModel, padded_vocab_size
from lockstep.placement import PP, data_shards, make_mesh, tensor_sizes
from lockstep.placement.device import raw_stats, used_bytes
from lockstep.training import OptimizerConfig, Trainer, TrainerConfig, lm_loss
from lockstep.types import Request, SamplingParams

GAP: Final = 1e-3  # nats between the engine's log-probabilities and those of the training forward that float32 explains
WRONG_GAP: Final = 0.5  # nats that no rounding explains
ROUNDS: Final = 2  # rounds of each layout
SEND: Final = "Send this report (--json) and the logs of all processes to the issues of the project."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The course of a run."""

    losses: Sequence[str]  # the loss of each step, in hexadecimal digits
    traces: int  # how often the train step was traced
    used: int | None = None  # bytes in use on a device when it was over; None where they are not counted
    memory: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the devices' own figures, by when


def judge_losses(test: str, plain: TrainingRun, sampled: TrainingRun, layouts: Sequence[str]) -> Finding:
    """Say whether training went on as if there were no samples; the first layout is that of the round after step 2."""
    name = f"{test}: losses"
    if plain.losses != sampled.losses:
        pairs = list(zip(plain.losses, sampled.losses, strict=True))
        first = next(i for i, (without, with_samples) in enumerate(pairs) if without != with_samples)
        after = [
            "nothing was sampled",
            "the injected failure",
            *(f"the round in layout {layout}" for layout in layouts),
        ]
        before = after[first] if first < len(after) else "the rounds in all layouts"
        without, with_samples = (float.fromhex(loss) for loss in pairs[first])
        return Finding.to_fix(
            name,
            f"the loss of step {first + 1}, after {before}, is {with_samples!r}, and without samples {without!r}.",
            SEND,
        )
    if (plain.traces, sampled.traces) != (1, 1):
        text = f"the train step was traced {sampled.traces} times with samples and {plain.traces} times without."
        return Finding.to_fix(name, text, SEND)
    begin, end = (float.fromhex(plain.losses[i]) for i in (0, -1))
    return Finding.ok(
        name,
        f"{len(plain.losses)} losses are equal bit for bit with and without samples ({begin:.3f} to {end:.3f}); the "
        "train step was compiled once in each run",
    )


def judge_failure(test: str, rounds: int, skipped: int, processes: int) -> Finding:
    """Say whether the injected failure was skipped by all."""
    name = f"{test}: failure on one host"
    if (rounds, skipped) == (0, 1):
        everyone = f"all {processes} processes" if processes > 1 else "the only process"
        return Finding.ok(name, f"the round was skipped on {everyone}, and training went on")
    return Finding.to_fix(name, f"{rounds} rounds were made and {skipped} skipped; expected are 0 and 1.", SEND)


def judge_layouts(test: str, results: Sequence[LayoutResult]) -> list[Finding]:
    """Say whether each layout answered as the model does, and all of them the same from the same weights."""
    findings = [_judge_layout(f"{test}: layout {result.layout}", result) for result in results]
    answers = {result.layout: result.answers for result in results if result.state == "tested"}
    return [*findings, _judge_answers(f"{test}: answers", answers)] if len(answers) > 1 else findings


def judge_memory(test: str, plain: TrainingRun, sampled: TrainingRun) -> Finding:
    """Say whether samples have left device memory in use."""
    name = f"{test}: memory"
    if plain.used is None or sampled.used is None:
        return Finding.ok(name, "not counted on these devices")
    text = f"{sampled.used:,} bytes in use after the run with samples, {plain.used:,} after the one without"
    return Finding.ok(name, text) if sampled.used <= plain.used else Finding.warning(name, f"{text}.", SEND)


def _judge_layout(name: str, result: LayoutResult) -> Finding:
    if result.state == "auto":
        return Finding.ok(name, "is the one that auto has chosen")
    if result.state == "late":
        return Finding.warning(name, "not tested: the time of the self-test was over.", "Raise self_test_s.")
    if result.rounds != ROUNDS or set(result.traces) != {1}:
        text = (
            f"{result.rounds} rounds of {ROUNDS}; programs were traced {list(result.traces)} times, expected is once."
        )
        return Finding.to_fix(name, text, SEND)
    text = (
        f"{ROUNDS} rounds, the first in {result.seconds:.1f} s; log-probabilities are within {result.gap:.2g} of the "
    )
    text += "training forward's"
    if result.mean_noise:
        text += f"; {result.mean_gap:.2g} in the mean, of which rounding explains {2 * result.mean_noise:.2g}"
    if result.gap <= GAP or result.mean_gap <= 2 * result.mean_noise and result.gap < WRONG_GAP:
        return Finding.ok(name, text)
    return (Finding.warning if result.gap < WRONG_GAP else Finding.to_fix)(name, f"{text}.", SEND)


def _judge_answers(name: str, answers: Mapping[str, Sequence[str]]) -> Finding:
    (first, expected), *later = answers.items()
    different = {
        layout: sum(answer != other_answer for answer, other_answer in zip(expected, texts, strict=True))
        for layout, texts in later
    }
    if not any(different.values()):
        return Finding.ok(name, f"{len(answers)} layouts give the same {len(expected)} answers from the same weights")
    listed = ", ".join(f"{number} in {layout}" for layout, number in different.items() if number)
    text = f"other answers than in layout {first}, of {len(expected)}: {listed}."
    return Finding.warning(name, text, f"A few are near-ties that rounding decides. If there are many: {SEND}")


def judge_bits(test: str, layouts: Sequence[str], bits: Sequence[Sequence[str]], gap: float) -> Finding:
    """Say whether ``numerics: exact`` is exact on these devices.

    Args:
        bits: For each layout the log-probabilities of the same tokens, in hexadecimal digits.
        gap: The largest difference between the first layout's and the training forward's, in nats.
    """
    name, expected = f"{test}: exact numerics", bits[0]
    different = {
        layout: sum(bit_text != other_text for bit_text, other_text in itertools.zip_longest(expected, layout_bits))
        for layout, layout_bits in zip(layouts, bits, strict=True)
    }
    if gap == 0 and not any(different.values()):
        text = f"{len(expected)} log-probabilities have the same bits in layouts {', '.join(layouts)} and in training"
        return Finding.ok(name, text)
    listed = ", ".join(f"{number} in layout {layout}" for layout, number in different.items() if number) or "none"
    text = f"of {len(expected)} log-probabilities have other bits than in layout {layouts[0]}: {listed}; the training "
    return Finding.warning(name, f"{text}forward's differ by up to {gap:.2g}.", f"Set numerics to fast. {SEND}")


def compare_bits(hosts: Hosts, test: str, mesh: Mesh) -> Finding:
    """Sample a small model with ``numerics: exact`` in bfloat16 in two layouts, and compare bits with training."""
    shape = dataclasses.replace(shape_for(mesh), numerics="exact")
    trainer = Trainer(TrainerConfig(num_train_steps=1, train_batch_size=data_shards(mesh)), OptimizerConfig().build(1),
                      lm_loss, hosts, mesh=mesh)  # fmt: skip
    vocab = hax.Axis("vocab", math.lcm(64, mesh.shape["tp"]))
    model = trainer.init_model(lambda key: LlamaLMHeadModel.init(vocab, shape, key=key))
    params = SamplingParams(max_new_tokens=16, temperature=0.8, n_generations=3)
    requests = [Request(prompt_id=i, prompt_tokens=tuple(range(7 * i + 1)), params=params) for i in range(8)]
    layouts: list[Layout] = ["training", {"tensor": max(size for size in tensor_sizes(mesh) if 8 % size == 0)}]
    try:
        answers = [
            Engine(EngineConfig(layout=layout, dtype="bfloat16"), mesh).generate(model, requests, hosts=hosts)
            for layout in layouts
        ]
    except HostError as error:
        if not error.on_every_process:
            raise
        return Finding.warning(f"{test}: exact numerics", str(error), f"Set numerics to fast. {SEND}")
    gap = audit(model, requests, answers[0], dtype="bfloat16", hosts=hosts).logprob_gap
    bits = [[value.hex() for completion in completions for value in completion.logprobs] for completions in answers]
    return judge_bits(test, [layout_text(layout) for layout in layouts], bits, gap)


def self_test(
    hosts: Hosts, mesh_shape: str, deadline: float, *, all_layouts: bool = True
) -> tuple[list[Finding], dict[str, Any]]:
    """Train with and without samples; every process makes the same call.

    Args:
        deadline: The time (`time.monotonic`) on the leader after which no other layout is begun.
        all_layouts: Whether to decode in every layout, or only in that of ``auto`` and in that of training.
    """
    test = f"self-test on mesh {mesh_shape}"
    begin = time.monotonic()
    try:
        findings, values = _self_test(hosts, test, mesh_shape, deadline, all_layouts=all_layouts)
    except HostError as error:
        if not error.on_every_process:
            raise
        return [dataclasses.replace(failed(test, error), fix=SEND)], {}
    return findings, {test: {"seconds": time.monotonic() - begin, **values}}


def _self_test(
    hosts: Hosts, test: str, mesh_shape: str, deadline: float, *, all_layouts: bool
) -> tuple[list[Finding], Mapping[str, Any]]:
    with hosts.run_on_all(test):
        mesh = make_mesh(mesh_shape)
        shape_for(mesh)
    dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    layouts: list[Layout] = ["auto"] if PP in mesh.shape else ["auto", "training"]
    if all_layouts:
        layouts += [{"tensor": size} for size in tensor_sizes(mesh)]
    with tempfile.TemporaryDirectory(prefix="lockstep-self-test-") as directory:
        rounds = LayoutRounds(hosts, layouts, dtype, Path(directory), deadline)
        plain = _train(hosts, mesh, rounds.steps, dtype, None)
        sampled = _train(hosts, mesh, rounds.steps, dtype, rounds)
        rounds.finish()
        # The leader alone has the answers and their numbers.
        told = hosts.broadcast_from_leader(
            f"{test}: layouts",
            lambda: json.dumps(
                [dataclasses.asdict(finding) for finding in judge_layouts(test, rounds.results())]
            ).encode(),
        )
    memory = hosts.gather(f"{test}: memory", json.dumps(sampled.memory).encode())
    with hosts.launch_on_all(f"{test}: losses and launches") as phase:
        phase.agree({f"losses {test} samples": " ".join(run.losses) for test, run in _named(plain, sampled)})
    return [
        judge_losses(test, plain, sampled, rounds.layouts),
        judge_failure(test, rounds.failing.rounds, rounds.failing.skipped_rounds, hosts.count),
        *from_peer(told, list[Finding], "what the leader found"),
        judge_memory(test, plain, sampled),
        *([compare_bits(hosts, test, mesh)] if all_layouts and PP not in mesh.shape else []),
        Finding.ok(
            f"{test}: launches",
            f"{hosts.ledger.count} launches since doctor began, the same in the same order on every process",
        ),
    ], {
        **{f"losses {test} samples": list(run.losses) for test, run in _named(plain, sampled)},
        "memory of each process": [
            from_peer(memory_of_process, dict[str, Any], "memory of a host") for memory_of_process in memory or ()
        ],
    }


def _named(plain: TrainingRun, sampled: TrainingRun) -> list[tuple[str, TrainingRun]]:
    return [("without", plain), ("with", sampled)]


def _train(hosts: Hosts, mesh: Mesh, steps: int, dtype: str, rounds: LayoutRounds | None) -> TrainingRun:
    """Train the small model for some steps, with rounds of samples between them or without."""
    tokenizer, shape = make_tokenizer(), shape_for(mesh)
    batch_size = 2 * data_shards(mesh)
    precision = "p=f32" if dtype == "float32" else "p=f32,c=bf16"
    config = TrainerConfig(num_train_steps=steps, train_batch_size=batch_size, mp=precision)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0)
    trainer = Trainer(config, optimizer.build(steps), lm_loss, hosts, mesh=mesh)
    losses: dict[int, str] = {}
    trainer.add_hook(lambda info: losses.__setitem__(info.step, float(info.loss).hex()))
    memory = {"before the first step": raw_stats()}
    trainer.add_hook(lambda info: memory.setdefault("after the first step", raw_stats()) if info.next_step else None)
    if rounds is not None:
        trainer.add_hook(rounds)
        trainer.add_hook(lambda info: memory.__setitem__("after the last round", raw_stats()))
    vocab = hax.Axis("vocab", padded_vocab_size(len(tokenizer), mesh.shape["tp"]))
    trainer.train(
        trainer.init_model(lambda key: LlamaLMHeadModel.init(vocab, shape, key=key)),
        make_rows(tokenizer, 4 * batch_size),
    )
    traces = trainer.train_step_traces
    del trainer
    gc.collect()
    return TrainingRun(losses=[losses[step] for step in range(steps)], traces=traces, used=used_bytes(), memory=memory)
