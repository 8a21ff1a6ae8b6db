"""The leader's report of a round, behind a queue that training never waits for."""

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.callback.config import InferenceEvalConfig
from lockstep.callback.evaluation import PREFIX, TaskResults
from lockstep.engine import Generation
from lockstep.errors import ConfigError, LockstepError
from lockstep.health import AnsweredPrompt, RoundHealth, Vocabulary, measure_round
from lockstep.hosts import leader_only, try_leader_only
from lockstep.printable import get_logger
from lockstep.report import (
    AlarmLog,
    BackgroundQueue,
    Judge,
    NoopTracker,
    Row,
    Tracker,
    append_jsonl,
    load_metrics,
    measure,
    metric_means,
    pass_rates,
    print_table,
)
from lockstep.text import Prompt, token_texts
from lockstep.text.stop import AnswerDecoder
from lockstep.types import Completion, FinishReason, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

TASKS_FILE = "tasks.jsonl"  # the rows of tasks, beside `samples.jsonl`
MAX_WAITING = 8
"""Reports that may wait behind the one being made; each keeps the tokens of its round in the host's memory."""


_WRITERS: weakref.WeakValueDictionary[Path, "Reporter"] = weakref.WeakValueDictionary()
"""The reporters of this process that write rows, by file."""


_LATEST: weakref.WeakValueDictionary[object, "Reporter"] = weakref.WeakValueDictionary()
"""The reporter that wrote last, by file, or by tracker and name."""


class Reporter:
    """Makes the reports of rounds, one after the other, on a thread of its own; the leader alone has one that works.

    A report is one job: rows, metrics, file, terminal table, tracker. Nothing in it can launch a device program. What
    fails is logged and counted; what is slow, or never returns, delays later reports and nothing else.
    """

    def __init__(
        self,
        *,
        name: str,
        config: InferenceEvalConfig,
        tokenizer: "PreTrainedTokenizerBase",
        tracker: Tracker | None,
        samples_path: Path | None,
    ) -> None:
        self.errors = 0  # parts of reports that failed; a metric counts once per round
        self.dropped = 0  # reports that were not made because the queue was full
        self._name, self._config, self._tokenizer, self._samples_path = name, config, tokenizer, samples_path
        self._decoded = AnswerDecoder(tokenizer)
        if samples_path is not None and (writer := _WRITERS.setdefault(samples_path, self))._name != name:
            raise ConfigError(
                f"output_dir of callback {name!r} is that of {writer._name!r} ({samples_path.parent}), and rows do not "
                "say whose they are. Give each callback a directory of its own."
            )
        self._tracker: Tracker = NoopTracker() if tracker is None else tracker
        self._metrics = load_metrics(config.metrics)
        self._judge = None if config.judge is None else Judge(config.judge)
        directory = None if samples_path is None else samples_path.parent
        self._alarms = AlarmLog(config.alarms, name, self._tracker, directory)
        self._queue = BackgroundQueue("lockstep-report", size=MAX_WAITING)
        self._written: set[object] = set()
        self._mixed = False

    def report(
        self,
        step: int,
        prompts: list[Prompt],
        result: Generation,
        counts: Mapping[str, float],
        requests: Sequence[Request] = (),
    ) -> None:
        """Queue the report of a round; returns at once.

        Args:
            requests: The prompts as the engine had them; the text of an answer goes on from them.
        """
        size = len(result.completions)
        description = f"step {step} ({size} row{'s' * (size != 1)})"
        self._put(description, lambda: self._report(step, prompts, result, counts, requests))

    def log(self, step: int, counts: Mapping[str, float]) -> None:
        """Queue numbers for the tracker; returns at once."""
        self._put(f"step {step} (skipped)", lambda: self._try("the tracker", step, lambda: self._log(step, counts)))

    def report_tasks(self, step: int, results: TaskResults | Exception) -> None:
        """Queue the report of a round of tasks; returns at once."""
        if isinstance(results, Exception):
            self.errors += 1
            message = f"{self._name}: the tasks after step {step} could not be scored; training goes on: {results}"
            log.error(message, exc_info=None if isinstance(results, LockstepError) else results)
            self.log(step, {})
            return
        rows = [] if self._config.skip_samples_table else results.rows

        def write_file() -> None:
            if self._samples_path is not None:
                append_jsonl(self._samples_path.with_name(TASKS_FILE), [row.to_dict() for row in results.rows])

        def track() -> None:
            self._tracker.log(results.scalars(step), step=step)
            self._tracker.log_rows(f"{PREFIX}/tasks", rows, step=step)

        def work() -> None:
            log.info("%s: tasks after step %d: %s", self._name, step, results.describe())
            self._try(f"writing {TASKS_FILE}", step, write_file)
            self._try("the tracker", step, track)
            for failure in results.failures:
                self.errors += 1
                log.error("%s: after step %d %s; training goes on", self._name, step, failure)

        self._put(f"the tasks of step {step}", work)

    @property
    def stop_reason(self) -> str | None:
        """Why an alarm wants the run to end; None where none does."""
        return self._alarms.stop_reason

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.from_tokenizer(self._tokenizer)

    def flush(self, timeout_s: float, spent_s: float = 0.0) -> bool:
        """Wait until all reports are made; log which are not, and return whether all are."""
        left = self._queue.flush(max(0.0, timeout_s - spent_s))
        if left:
            log.error(
                "%s: after %g s the report of %s is not done%s. A metric, the disk or the tracker is slow or hangs. "
                "What is not done when the process ends is lost",
                self._name,
                timeout_s,
                left[0],
                f", and behind it wait {', '.join(left[1:])}" if left[1:] else "",
            )
        return not left

    def _put(self, description: str, work: Callable[[], object]) -> None:
        if not self._queue.put(description, work):
            self.dropped += 1
            log.error(
                "%s: the report of %s is dropped, because %d earlier ones still wait: a metric, the disk or the "
                "tracker is slow or hangs; training goes on",
                self._name,
                description,
                MAX_WAITING,
            )

    def _report(
        self,
        step: int,
        prompts: list[Prompt],
        result: Generation,
        counts: Mapping[str, float],
        requests: Sequence[Request],
    ) -> None:
        start = time.perf_counter()
        rows: list[Row] = []
        looked_at: list[tuple[list[AnsweredPrompt], RoundHealth]] = []
        shown = not self._config.skip_samples_table

        def make_rows() -> None:
            by_id = {prompt.id: prompt for prompt in prompts}
            tokens = {request.prompt_id: request.prompt_tokens for request in requests}
            row_prompts = [by_id[completion.prompt_id] for completion in result.completions]
            answered = list(zip(row_prompts, result.completions, strict=True))
            made = [self._row(step, prompt, completion, tokens.get(prompt.id, ())) for prompt, completion in answered]

            def look() -> None:
                answers = [
                    row.answered(prompt, completion, tokens.get(prompt.id, ()))
                    for row, (prompt, completion) in zip(made, answered, strict=True)
                ]
                health = measure_round(answers, self._vocabulary)
                made[:] = [row.with_health(own) for row, own in zip(made, health.answers, strict=True)]
                looked_at.append((answers, health))

            if self._config.health:
                self._try("the health of answers", step, look)
            measured, failures = measure(self._metrics, made, row_prompts, guard=leader_only)
            if self._judge is not None:
                measured, unjudged = self._judge.judge(measured, row_prompts)
                failures += unjudged
            rows.extend(measured)
            for failure in failures:
                self.errors += 1
                log.error("%s: after step %d %s; training goes on", self._name, step, failure)

        def show() -> None:
            if shown:
                drafts = "" if result.drafts is None else f" (drafts: {result.drafts})"
                print_table(rows, title=f"{self._name}: what the model says after {step} steps{drafts}")

        def track() -> None:
            if shown:
                self._tracker.log_rows(f"{self._name}/samples", rows, step=step)
            values = {**scalars(rows, result), **(looked_at[0][1].scalars() if looked_at else {})}
            self._log(step, {**counts, **values, "time/report_s": time.perf_counter() - start})

        if self._try("making rows", step, make_rows):
            self._warn_of_another()
            if (path := self._samples_path) is not None:
                self._try("writing samples.jsonl", step, lambda: append_jsonl(path, [row.to_record() for row in rows]))
            self._try("the terminal table", step, show)
            self._try("the tracker", step, track)
            if looked_at:
                self._try("alarms", step, lambda: self._alarms.add(step, *looked_at[0]))

    def _warn_of_another(self) -> None:
        """Say once that another callback writes where this one does, in turn with it; one that it replaces does not."""
        places: dict[object, str] = {} if self._samples_path is None else {self._samples_path: str(self._samples_path)}
        if type(self._tracker) is not NoopTracker:
            places[id(self._tracker), self._name] = f"the tracker's {self._name}/"
        for place, text in places.items():
            latest = _LATEST.get(place)
            if not self._mixed and place in self._written and latest not in (None, self):
                self._mixed = True
                log.warning(
                    "%s: two callbacks of this name write in turn to %s, where rows do not say whose they are. Give "
                    "each a name and an output_dir of its own",
                    self._name,
                    text,
                )
            _LATEST[place] = self
            self._written.add(place)

    def _try(self, part: str, step: int, work: Callable[[], None]) -> bool:
        """Do a part of a report, in which a launch raises; whether it succeeded."""
        done = try_leader_only(f"{self._name}: {part} after step {step}", work, "training goes on")
        self.errors += not done
        return done

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        own = {"step": step, "report_errors": self.errors, "dropped_reports": self.dropped}
        self._tracker.log({f"{self._name}/{key}": value for key, value in {**own, **values}.items()}, step=step)

    def _row(self, step: int, prompt: Prompt, completion: Completion, prompt_tokens: Sequence[int]) -> Row:
        text, end = self._decoded(completion.tokens, prompt_tokens, self._config.stop)
        tokens: tuple[tuple[str, float], ...] = ()
        if self._config.token_logprobs:
            texts = token_texts(self._tokenizer, completion.tokens, prompt_tokens)
            tokens = tuple(zip(texts, map(float, completion.logprobs), strict=True))
        keep = self._config.keep_tokens
        return Row.from_completion(completion, prompt, text, keep_tokens=keep, prompt_end=end, step=step, tokens=tokens)


def scalars(rows: list[Row], result: Generation) -> dict[str, float]:
    """Return the numbers of a round under the names that a tracker gets, without the prefix."""
    tokens = sum(row.num_tokens for row in rows)
    return {
        "num_prompts": len({row.prompt_id for row in rows}),
        "num_completions": len(rows),
        "unfinished_completions": sum(row.finish_reason == FinishReason.BUDGET for row in rows),
        "generated_tokens": tokens,
        "tokens_per_second": tokens / result.seconds["generate"],
        **({} if result.drafts is None else result.drafts.metrics()),
        **{f"time/{phase}_s": seconds for phase, seconds in result.seconds.items()},
        **{f"hbm/{moment}_bytes": used for moment, used in result.memory.items()},
        **({} if result.audit is None else result.audit.scalars()),
        **metric_means(rows),
        **pass_rates(rows),
    }
