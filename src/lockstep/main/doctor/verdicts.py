"""What the self-test concludes from what it saw."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from lockstep.main.doctor.finding import Finding
from lockstep.main.doctor.layout_rounds import LayoutResult

GAP: Final = 1e-3
"""Nats between the engine's log-probabilities and those of the training forward that float32 explains."""
WRONG_GAP: Final = 0.5
"""Nats that no rounding explains."""
ROUNDS: Final = 2
"""Rounds of each layout."""
SEND: Final = "Send this report (--json) and the logs of all processes to the issues of the project."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """How a run went.

    Args:
        losses: The loss of each step, in hexadecimal digits.
        traces: How often the train step was traced.
        used: The bytes in use on a device when it was over; None where they are not counted.
    """

    losses: Sequence[str]
    traces: int
    used: int | None = None


def judge_losses(what: str, plain: TrainingRun, sampled: TrainingRun, layouts: Sequence[str]) -> Finding:
    """Say whether training went on as if there were no samples.

    Args:
        what: The name of the self-test.
        plain: The run without samples.
        sampled: The run with samples.
        layouts: The layouts in the order of their rounds, of which the first is after step 2.
    """
    name = f"{what}: losses"
    if plain.losses != sampled.losses:
        pairs = list(zip(plain.losses, sampled.losses, strict=True))
        first = next(i for i, (one, two) in enumerate(pairs) if one != two)
        after = ["nothing was sampled", "the injected failure", *(f"the round in layout {each}" for each in layouts)]
        before = after[first] if first < len(after) else "the rounds in all layouts"
        one, two = (float.fromhex(loss) for loss in pairs[first])
        return Finding.to_fix(
            name, f"the loss of step {first + 1}, after {before}, is {two!r}, and without samples {one!r}.", SEND
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


def judge_failure(what: str, rounds: int, skipped: int, processes: int) -> Finding:
    """Say whether the injected failure was skipped by all.

    Args:
        what: The name of the self-test.
        rounds: The rounds with samples that the failing callback has made.
        skipped: The rounds that it has skipped.
        processes: The number of processes.
    """
    name = f"{what}: failure on one host"
    if (rounds, skipped) == (0, 1):
        everyone = f"all {processes} processes" if processes > 1 else "the only process"
        return Finding.ok(name, f"the round was skipped on {everyone}, and training went on")
    return Finding.to_fix(name, f"{rounds} rounds were made and {skipped} skipped; expected are 0 and 1.", SEND)


def judge_layouts(what: str, results: Sequence[LayoutResult]) -> list[Finding]:
    """Say whether each layout answered as the model does, and all of them the same from the same weights.

    Args:
        what: The name of the self-test.
        results: What came of each layout.
    """
    findings = [_judge_layout(f"{what}: layout {one.layout}", one) for one in results]
    answers = {one.layout: one.answers for one in results if one.state == "tested"}
    return [*findings, _judge_answers(f"{what}: answers", answers)] if len(answers) > 1 else findings


def judge_memory(what: str, plain: TrainingRun, sampled: TrainingRun) -> Finding:
    """Say whether samples have left device memory in use.

    Args:
        what: The name of the self-test.
        plain: The run without samples.
        sampled: The run with samples.
    """
    name = f"{what}: memory"
    if plain.used is None or sampled.used is None:
        return Finding.ok(name, "not counted on these devices")
    text = f"{sampled.used:,} bytes in use after the run with samples, {plain.used:,} after the one without"
    return Finding.ok(name, text) if sampled.used <= plain.used else Finding.warning(name, f"{text}.", SEND)


def _judge_layout(name: str, one: LayoutResult) -> Finding:
    if one.state == "auto":
        return Finding.ok(name, "is the one that auto has chosen")
    if one.state == "late":
        return Finding.warning(name, "not tested: the time of the self-test was over.", "Raise self_test_s.")
    if one.rounds != ROUNDS or set(one.traces) != {1}:
        text = f"{one.rounds} rounds of {ROUNDS}; programs were traced {list(one.traces)} times, expected is once."
        return Finding.to_fix(name, text, SEND)
    text = f"{ROUNDS} rounds, the first in {one.seconds:.1f} s; log-probabilities are within {one.gap:.2g} of the "
    text += "training forward's"
    if one.mean_noise:
        text += f"; {one.mean_gap:.2g} in the mean, of which rounding explains {2 * one.mean_noise:.2g}"
    if one.gap <= GAP or one.mean_gap <= 2 * one.mean_noise and one.gap < WRONG_GAP:
        return Finding.ok(name, text)
    return (Finding.warning if one.gap < WRONG_GAP else Finding.to_fix)(name, f"{text}.", SEND)


def _judge_answers(name: str, answers: Mapping[str, Sequence[str]]) -> Finding:
    (first, expected), *others = answers.items()
    different = {layout: sum(one != two for one, two in zip(expected, texts, strict=True)) for layout, texts in others}
    if not any(different.values()):
        return Finding.ok(name, f"{len(answers)} layouts give the same {len(expected)} answers from the same weights")
    listed = ", ".join(f"{number} in {layout}" for layout, number in different.items() if number)
    text = f"other answers than in layout {first}, of {len(expected)}: {listed}."
    return Finding.warning(name, text, f"A few are near-ties that rounding decides. If there are many: {SEND}")
