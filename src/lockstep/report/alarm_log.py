"""Consequences of alarms: a line in the log, a record in the run directory, an alert of the tracker, a stop."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.health import Alarm, Alarms, AnsweredPrompt, PromptStates, RoundHealth, State, prompt_groups
from lockstep.health.alarms import FALSE_ALARMS, KEPT, WARM_UP
from lockstep.plugins import load_object
from lockstep.printable import get_logger, printable, visible, without_credentials
from lockstep.report.jsonl import append_jsonl, numbered_records
from lockstep.report.trackers import Tracker, alert_tracker

log = get_logger(__name__)

HEALTH_FILE: Final = "health.jsonl"
"""The file of a run directory with the states of each round's answers, and the alarms."""
ONCE_IN_S: Final = 24 * 3600.0  # seconds in which the same state is told once
USUAL: Final = (State.CUT, State.OTHER_SCRIPT, State.PROMPT_COPY, State.SAME_ANSWER)
"""States that many answers may be in because of what is asked: only a change of these is an alarm."""
_EXAMPLE: Final = 60  # characters of an answer's beginning, and of its end, that are told


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    """When a state of answers is an alarm, and what becomes of it (docs/health.md)."""

    on_alarm: str | None = "log"
    """``log``: a line in the log, a mark in the report, an alert of the tracker. ``stop``: the run ends too, after the
    same step on every host. ``module:function``: called with the alarm on the leader; where it returns true, the run
    ends. Null: no alarms."""
    false_alarms: float = FALSE_ALARMS
    """False alarms per round, over all states and groups together."""
    warm_up: int | None = None
    """Rounds without an alarm at the beginning of a run. Null: 0 where the model was trained before
    (``initialize_from_hf``) and for rollouts, else 8. With 0, a state that more than a third of the answers have from
    the first round on is an alarm."""

    def load_action(self) -> Callable[[Alarm], object] | None:
        """The function of ``on_alarm``; None where it names none.

        Raises:
            ConfigError: There is no such function.
        """
        if self.on_alarm is None or ":" not in self.on_alarm:
            return None
        action: Callable[[Alarm], object] = load_object(self.on_alarm, "alarms.on_alarm")
        return action

    def of_trained(self, *, trained: bool = True) -> Self:
        """The same for a run whose model was trained before, or not."""
        return self if self.warm_up is not None else dataclasses.replace(self, warm_up=0 if trained else WARM_UP)

    def __post_init__(self) -> None:
        check_fields(self, "alarms.")
        if self.on_alarm is not None and self.on_alarm not in ("log", "stop") and ":" not in self.on_alarm:
            raise ConfigError(
                f"alarms.on_alarm is {self.on_alarm!r}; it must be log, stop, module:function or null. Correct it."
            )
        default = f". The default is {FALSE_ALARMS}."
        check_at_least(self, 0, "false_alarms", block="alarms.", fix=default, above=True, below=1)
        check_at_least(self, 0, "warm_up", block="alarms.", fix=". Use null for the default.")

    def check_health(self, health: bool, block: str) -> None:
        """Check that somebody looks at the health of answers where alarms are set.

        Args:
            block: The block of the configuration that has both, such as ``rollout``.
        """
        if not health and self not in (AlarmsConfig(), AlarmsConfig(on_alarm=None)):
            raise ConfigError(f"{block}.health is false, so {block}.alarms has no effect. Remove one of the two.")


class AlarmLog:
    """Looks for alarms after each round, and tells each once a day; the leader alone has one, behind its queue.

    Args:
        name: The name of the rounds, such as ``inference_eval``.
        directory: The directory with `HEALTH_FILE`, from which a run goes on; None: nothing is kept.
        clock: Returns the seconds since the epoch.

    Raises:
        ConfigError: There is no such function.
    """

    def __init__(
        self,
        config: AlarmsConfig,
        name: str,
        tracker: Tracker,
        directory: Path | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._name, self._tracker, self._clock = config, name, tracker, clock
        self._file = None if directory is None else directory / HEALTH_FILE
        self._alarms: Alarms | None = None
        self._told: dict[str, float] = {}  # the time at which each state was told last
        self._action = config.load_action()
        self.stop_reason: str | None = None
        """Why the run should end; None while it may go on."""

    def add(self, step: int, answers: Sequence[AnsweredPrompt], health: RoundHealth) -> None:
        """Take in a round: write its record, and tell of its alarms.

        Raises:
            ExceptionGroup: The file, the tracker or the function failed; the others were tried.
        """
        if self._config.on_alarm is None or not answers:
            return
        if self._alarms is None:
            self._alarms = self._resumed(step)
        alarms = self._alarms.add(step, prompt_states(answers, health))
        records: list[dict[str, Any]] = [{"step": step, "name": self._name, "round": self._alarms.record()}]
        told = []
        for alarm in alarms:
            line = f"{alarm}; {_example(alarm, answers, health)}"
            records.append({"step": step, "name": self._name, "alarm": dataclasses.asdict(alarm), "line": line})
            if self._clock() - self._told.get(alarm.state, float("-inf")) >= ONCE_IN_S:
                self._told[alarm.state] = self._clock()
                # Without a step: a run that goes back to a checkpoint keeps it, and does not tell the same again.
                records.append({"name": self._name, "told": alarm.state, "time": self._clock()})
                told.append((alarm, line))
        for _, line in told:
            log.warning("%s: %s", self._name, line)
        failures: list[Exception] = []
        if (file := self._file) is not None:
            self._try(failures, lambda: append_jsonl(file, records))
        for alarm, line in told:
            self._act(alarm, line, failures)
        if failures:
            raise ExceptionGroup("what becomes of an alarm", failures)

    def _act(self, alarm: Alarm, line: str, failures: list[Exception]) -> None:
        text = printable(without_credentials(line))
        title = f"{self._name}: {alarm.state}"
        self._try(failures, lambda: alert_tracker(self._tracker, title=title, text=text, step=alarm.step))

        def stop() -> None:
            if self._config.on_alarm == "stop" or (self._action is not None and self._action(alarm)):
                self.stop_reason = f"{self._name}: {text}"

        self._try(failures, stop)

    @staticmethod
    def _try(failures: list[Exception], work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # a file, a service, or a function of the user's
            failures.append(error)

    def _resumed(self, step: int) -> Alarms:
        """The alarms of a run that begins, or goes on, with the round of a step."""
        warm_up = WARM_UP if self._config.warm_up is None else self._config.warm_up

        def new() -> Alarms:
            return Alarms(
                [state.value for state in State],
                false_alarms=self._config.false_alarms,
                warm_up=warm_up,
                usual=[state.value for state in USUAL],
            )

        alarms = new()
        if self._file is None or not self._file.exists():
            return alarms
        try:
            rounds: dict[int, Mapping[str, Any]] = {}
            for _, record in numbered_records(self._file)[0]:
                if record.get("name") != self._name:
                    continue
                if "told" in record:
                    self._told[str(record["told"])] = float(record["time"])
                elif "round" in record:
                    rounds[int(record["step"])] = record["round"]
            for earlier in sorted(number for number in rounds if number < step)[-2 * KEPT :]:
                alarms.resume(earlier, rounds[earlier])
        except Exception as error:  # whatever is in the file
            log.warning("%s cannot be read, and alarms begin anew: %s", self._file, error)
            return new()
        return alarms


def prompt_states(answers: Sequence[AnsweredPrompt], health: RoundHealth) -> list[PromptStates]:
    """The states of a round's answers by prompt, for `lockstep.health.Alarms`."""
    by_prompt: dict[int, list[int]] = {}
    for place, answer in enumerate(answers):
        by_prompt.setdefault(answer.prompt.id, []).append(place)
    for places in by_prompt.values():
        places.sort(key=lambda place: answers[place].completion.generation_id)
    prompts = [answers[places[0]].prompt for places in by_prompt.values()]
    return [
        PromptStates(
            prompt=str(prompt.id),
            answers=[[str(state) for state in health.answers[place].states] for place in places],
            groups=groups,
        )
        for prompt, places, groups in zip(prompts, by_prompt.values(), prompt_groups(prompts), strict=True)
    ]


def _example(alarm: Alarm, answers: Sequence[AnsweredPrompt], health: RoundHealth) -> str:
    """An answer that is in the state, on one line, without its middle."""
    for prompt in alarm.prompts:
        for answer, own in zip(answers, health.answers, strict=True):
            if str(answer.prompt.id) == prompt and alarm.state in own.states:
                text = visible(without_credentials(answer.text))
                if len(text) > 2 * _EXAMPLE:
                    text = f"{text[:_EXAMPLE]} … {text[-_EXAMPLE:]}"
                return f'such as prompt {prompt}: "{text}"'
    return "none of this round"
