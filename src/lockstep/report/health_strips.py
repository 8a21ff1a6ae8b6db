"""The health of a run over its steps: the share of answers in each state, and the alarms, for the page and ``tail``."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from lockstep.errors import LockstepError
from lockstep.health import State
from lockstep.report.jsonl import numbered_records
from lockstep.report.saved_rows import SavedRow

MAX_CELLS: Final = 400  # cells of a strip at most; a longer one has several rounds in a cell
ROLLOUTS: Final = "rollout"  # the name of the rounds whose rows are not all in a file


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToldAlarm:
    """An alarm as `HEALTH_FILE` has it."""

    name: str  # the name of the rounds, such as `inference_eval`
    step: int  # the step that it was told at
    began: int  # the step since which the state is there
    state: str
    line: str  # all of it as one line

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self | None:
        """The alarm of a line; None where it has another thing."""
        alarm = record.get("alarm")
        if not isinstance(alarm, Mapping):
            return None
        step, began, state = alarm.get("step"), alarm.get("began"), alarm.get("state")
        if not (isinstance(step, int) and isinstance(began, int) and isinstance(state, str)):
            return None
        return cls(
            name=str(record.get("name", "")), step=step, began=began, state=state, line=str(record.get("line", ""))
        )

    @property
    def text(self) -> str:
        """The line with the name of the rounds."""
        return f"{self.name}: {self.line}"


def lasting_states(record: Mapping[str, Any]) -> set[str] | None:
    """The states whose alarms last after the round of a line; None where it has no round."""
    match record.get("round"):
        case {"lasting": [*alarms]}:
            return {str(alarm.get("state")) for alarm in alarms if isinstance(alarm, Mapping)}
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strip:
    """Rounds with a number of answers and how many of them are in each state."""

    steps: list[int]
    answers: list[int]
    states: dict[str, list[int]]

    @classmethod
    def of(cls, rounds: Mapping[int, Mapping[str, int]]) -> Self:
        """The strip of rounds by step: the answers in each state, and of all answers under the empty name."""
        steps = sorted(rounds)
        size = -(-len(steps) // MAX_CELLS) or 1
        cells = [steps[first : first + size] for first in range(0, len(steps), size)]
        totals = [sum((collections.Counter(rounds[step]) for step in cell), collections.Counter()) for cell in cells]
        names = [state.value for state in State] + sorted({name for total in totals for name in total} - {"", *State})
        return cls(
            steps=[cell[0] for cell in cells],
            answers=[total[""] for total in totals],
            states={name: [total[name] for total in totals] for name in names},
        )


def read_strips(rows: Sequence[SavedRow], paths: Iterable[Path]) -> tuple[dict[str, Strip], list[ToldAlarm]]:
    """The strips of a run by the name of their rounds, without those of no answer; and its alarms, the last one first.

    Those of samples are counted from their rows, of which a file has all.

    Args:
        paths: The files of the health of rounds.

    Raises:
        LockstepError: A line cannot be read; the message has file and line.
    """
    samples: collections.defaultdict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        if row.health is not None and not row.rollout:
            samples[row.when].update(["", *row.health.split()])
    rollouts: dict[int, collections.Counter[str]] = {}
    alarms: dict[tuple[str, int, str], ToldAlarm] = {}
    for path in paths:
        for number, record in numbered_records(path)[0]:
            if (alarm := ToldAlarm.from_record(record)) is not None:
                alarms[alarm.name, alarm.step, alarm.state] = alarm
            elif record.get("name") == ROLLOUTS and "round" in record:
                try:
                    counts = {state: len(places) for state, places in record["round"]["states"].items()}
                    rollouts[int(record["step"])] = collections.Counter({"": sum(record["round"]["answers"])} | counts)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise LockstepError(f"{path}:{number}: it is no round ({error!r}). Remove the line.") from error
    strips = {"samples": Strip.of(samples), "rollouts": Strip.of(rollouts)}
    told = sorted(alarms.values(), key=lambda alarm: -alarm.step)
    return {name: strip for name, strip in strips.items() if strip.steps}, told
