"""The hook: when to sample, and what a failed round does."""

import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.callback.config import InferenceEvalConfig
from lockstep.callback.evaluation import ModelSession, TaskRounds, limits_of
from lockstep.callback.loop_calls import CalledSteps, by_one_thread, check_made_of, completed_steps, sampled_model
from lockstep.callback.reporter import Reporter
from lockstep.callback.round import RoundPrompts, keep_answers, read_round_prompts, run_round, with_drafts
from lockstep.engine import EarlierAnswers, Engine
from lockstep.errors import ConfigError, DisagreementError, HostError, PeerError
from lockstep.hosts import Hosts, JobHosts, digest, environment
from lockstep.json_text import typed
from lockstep.placement.device import own_settings
from lockstep.printable import get_logger
from lockstep.report import Tracker
from lockstep.text import ModelLimits, tokenizer_digest
from lockstep.urls import absolute_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

MAX_TASK_SECONDS = 900.0  # seconds that a round of tasks may last where the configuration does not say
AFTER_SIGNAL_S = 2.0  # seconds that reports have after a signal: little time remains for a save


KEPT = ("last_step", "rounds", "skipped_rounds", "abandoned_rounds", "tasks_left", "last_tasks")
"""Attributes of a callback that a checkpoint keeps; the leader's own failures and errors in a row begin anew."""


def config_facts(config: InferenceEvalConfig) -> dict[str, str]:
    """The values that hosts must agree on, by key: numbers as they are, other values as digests."""
    texts = {key: json.dumps(value, sort_keys=True) for key, value in dataclasses.asdict(config).items()}
    return {
        f"{config.BLOCK}.{key}": text if isinstance(getattr(config, key), int | float | None) else digest(text)
        for key, text in texts.items()
    }


class SampleCallback:
    """Samples from the model inside a training loop, on all hosts in lockstep; training goes on untouched.

    Call it on every host with anything that has ``step`` and ``model``: it decides from the number of completed steps
    alone whether a round is due, so every host decides the same. The number is ``info.next_step`` where there is one
    (Levanter and lockstep count ``step`` from 0), else ``info.step``.

    Args:
        config: When to sample, what, and within which limits.
        tracker: The tracker that rows and scalars go to, after the round, while training goes on; used by the leader
            alone, from a thread of its own, so it may be slow. It stays the caller's to finish. None for none.
        name: The prefix of the table and of the metrics; two callbacks in one run need two names, and two directories.
        output_dir: The directory where the leader appends to ``samples.jsonl``; None for no file.
        hosts: The processes of the job; None for those of the job at the first round or `check`, which may be joined
            after the callback is made.
        dtype: The floating dtype to decode in, the trainer's compute dtype; None: the dtype of the parameters.
        every_call: Whether a round is due at every call, because the loop has the schedule.

    Example:
        >>> from types import SimpleNamespace
        >>> config = lockstep.InferenceEvalConfig(prompts=["What is 12 plus 7?"], eval_every=10, max_new_tokens=4)
        >>> callback = lockstep.SampleCallback(config, tokenizer)
        >>> for step in range(1, 11):
        ...     callback(SimpleNamespace(step=step, model=model))  # after every step, on every host
        >>> callback.finish()
        >>> callback.rounds, callback.skipped_rounds
        (1, 0)
    """

    def __init__(
        self,
        config: InferenceEvalConfig,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        tracker: Tracker | None = None,
        name: str = "inference_eval",
        output_dir: str | os.PathLike[str] | None = None,
        hosts: Hosts | None = None,
        dtype: str | None = None,
        every_call: bool = False,
    ) -> None:
        check_made_of(config, tokenizer, tracker)
        self.config = config
        if isinstance(config.prompts, str):
            self.config = dataclasses.replace(config, prompts=absolute_path(config.prompts))
        self.name = name
        self.rounds = 0
        """Rounds that produced samples."""
        self.skipped_rounds = 0
        """Rounds that failed and were skipped on every host."""
        self.abandoned_rounds = 0
        """Rounds that ended without samples because the job was asked to end."""
        self.interrupted = False
        """Whether the last call left a round undone because the job is asked to end: a resume has to do it."""
        self.tasks_left: int | None = None
        """The step of the last round whose tasks are undone because the job is asked to end; None where none are."""
        self.last_tasks: int | None = None
        """The step of the last round of tasks, finished or failed; None before the first."""
        self.switched_off = False
        """Whether ``max_consecutive_errors`` rounds in a row were skipped, so that no more are tried."""
        self._tokenizer = tokenizer
        self._reporter = Reporter(
            name=name,
            config=config,
            tokenizer=tokenizer,
            tracker=tracker,
            samples_path=None if output_dir is None else Path(absolute_path(output_dir)) / "samples.jsonl",
        )
        self._job_hosts = JobHosts(hosts)
        self._every_call = every_call
        self.tasks: TaskRounds | None = None
        """The rounds of tasks, with their counts; None without ``tasks``."""
        if config.enabled and config.tasks.names:
            engine = dataclasses.replace(config.engine_config(dtype), max_seq_len=config.tasks.max_seq_len)
            self.tasks = TaskRounds(
                name, config.tasks, engine, tokenizer, self._reporter.report_tasks, self._job_hosts, config.timeout_s,
                MAX_TASK_SECONDS,
            )  # fmt: skip
        self._task_errors_in_a_row = 0
        self._session = ModelSession(config.engine_config(dtype), tokenizer, audit=config.audit)
        self._in_use = threading.RLock()
        self.last_step: int | None = None
        """The step of the last round, finished or failed; None before the first."""
        self._earlier = EarlierAnswers(config.drafts)
        self._errors_in_a_row = 0
        self._calls = CalledSteps(config.eval_every)
        self._facts = {**config_facts(config), "tokenizer": tokenizer_digest(tokenizer)}

    @property
    def _hosts(self) -> Hosts:
        hosts = self._job_hosts()
        if not self.config.allow_multihost and hosts.count > 1:
            raise ConfigError(
                f"inference_eval.allow_multihost is false and this job has {hosts.count} processes. Set it to "
                "true to sample on all hosts in lockstep, or set inference_eval.enabled to false."
            )
        return hosts

    @property
    def engine(self) -> Engine | None:
        """The engine, or None before the first round."""
        return self._session.engine

    @property
    def stop_reason(self) -> str | None:
        """Why an alarm wants the run to end, on the leader; None where none does (``alarms.on_alarm``)."""
        return self._reporter.stop_reason

    @property
    def report_errors(self) -> int:
        """Parts of reports that failed on the leader so far: a metric in a round, the file, the table, the tracker."""
        return self._reporter.errors

    @property
    def dropped_reports(self) -> int:
        """Reports that were not made, because earlier ones were too slow."""
        return self._reporter.dropped

    def __call__(self, info: Any, force: bool = False) -> None:
        """See `on_step`."""
        self.on_step(info, force=force)

    @by_one_thread
    def on_step(self, info: Any, force: bool = False) -> None:
        """Run a round if one is due after ``info``'s step; every host calls it.

        Args:
            info: What has ``model``, and ``next_step`` or ``step``. The model is not kept. Where it has an
                ``eval_model``, such as an average of the parameters, that is sampled.
            force: Whether this is the loop's last call: run then unless this step had its round already, then `finish`.

        Raises:
            PeerError, DisagreementError: the round failed and ``on_error`` is raise; the same on every host.
            AlarmError: an alarm of an earlier round ends the run; the same on every host.
            LaunchMismatchError: hosts launched different programs; the same on every host.
            HostTimeoutError: a host is missing.
        """
        step = completed_steps(info)
        if self.config.enabled and not self._every_call:
            self._warn(self._calls.passed_over(step))
        self.interrupted, tasks_due, last = False, self.tasks_left == step, force and self.config.at_end
        if self._due(step, force):
            before, self.last_step = self.last_step, step
            self._round(step, sampled_model(info))
            if self.interrupted:
                self.last_step = before
            tasks_due = not self.interrupted and self.config.tasks.due(step, last=last)
        elif last and step == self.last_step:  # its samples came in their turn, its tasks only if it was theirs too
            tasks_due = step != self.last_tasks
        if tasks_due and self.tasks is not None and self._task_errors_in_a_row != self.config.max_consecutive_errors:
            self._run_tasks(self.tasks, step, sampled_model(info))
        if force and not self.interrupted:
            self.finish()

    @by_one_thread
    def finish(self) -> None:
        """Wait at most ``flush_s`` until all rounds are reported; every host calls it, and waits for the leader.

        Raises:
            HostTimeoutError: a host is missing.
        """
        if not self.config.enabled:
            return
        if not (self.rounds or self.skipped_rounds or self.abandoned_rounds):
            self._warn(self._calls.none_due())
        # The others wait longer than the leader may take, however short their other waits are.
        timeout_s = self.config.timeout_s + self.config.flush_s
        with self._hosts.scope(f"{self.name}/finish", timeout_s) as hosts:
            with hosts.run_on_all("finish", "writing the last samples"):
                self.flush()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all rounds so far are reported, on this host alone; say which are not.

        Args:
            timeout_s: The seconds to wait at most; None: the configuration's ``flush_s``.

        Returns:
            Whether all are reported.
        """
        limit_s = self.config.flush_s if timeout_s is None else timeout_s
        begin = time.monotonic()
        scored = self.tasks is None or self.tasks.wait(limit_s)
        if not scored:
            log.error(
                "%s: after %g s the last round of tasks is not scored. Its scores are lost if this process ends now",
                self.name,
                limit_s,
            )
        return self._reporter.flush(limit_s, spent_s=time.monotonic() - begin) and scored

    def after_signal(self) -> None:
        """Wait on this host, at most 2 s, for the last reports: a signal ended the loop without a last call."""
        self.flush(min(AFTER_SIGNAL_S, self.config.flush_s))

    def state(self) -> dict[str, Any]:
        """The state for a run that goes on from a checkpoint; the same on every host."""
        return {name: getattr(self, name) for name in KEPT} | {"drafts": self._earlier.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned in an earlier process."""
        for name, value in typed(dict[str, int | bool | None], {name: state[name] for name in KEPT}).items():
            setattr(self, name, value)
        self._earlier.load_state(state["drafts"])

    @by_one_thread
    def check(self, model: Any) -> None:
        """Find out now what would make a round fail, the same on every host: prompts, sizes, model, configuration.

        Launches nothing. Training scripts call it before the first step, so that a mistake ends the run there and not
        in the hundredth step.

        Raises:
            PeerError: something failed on at least one host; the same text on every host.
            DisagreementError: hosts hold different configurations or tokenizers.
        """
        if not self.config.enabled:
            return
        with own_settings(), self._hosts.scope(f"{self.name}/check", self.config.timeout_s) as hosts:
            with hosts.run_on_all("check") as checked:
                checked.agree({**self._facts, **environment()})
                read = self._session.read(hosts, model)
                if hosts.is_leader:
                    self._session.check(hosts, read, self._read_prompts(0, limits_of(read)).compile_requests)
                    if self.tasks is not None:
                        self.tasks.check()

    def _due(self, step: int, force: bool) -> bool:
        config = self.config
        if not config.enabled or self.switched_off or step == self.last_step:
            return False
        if step == 0:
            return config.at_start
        return self._every_call or step % config.eval_every == 0 or (force and config.at_end)

    def _round(self, step: int, model: Any) -> None:
        try:
            with own_settings(), self._hosts.scope(self.name, self.config.timeout_s) as hosts:
                result = run_round(
                    hosts,
                    self._session,
                    model,
                    facts={"step": str(step), **self._facts},
                    read=lambda limits: self._read_prompts(step, limits),
                    filters=self.config.filters,
                    max_seconds=self.config.max_seconds,
                    stop_reason=self._reporter.stop_reason,
                )
        except (PeerError, DisagreementError) as error:
            self._skip(step, error)
            return
        self._errors_in_a_row = 0
        if result is None:
            self.abandoned_rounds += 1
            self.interrupted = True
            if self._hosts.is_leader:
                log.warning("%s: the job is asked to end: no samples after step %d", self.name, step)
            return
        self.rounds += 1
        if self._hosts.is_leader:
            keep_answers(self._earlier, result.requests, result.generation.completions)
            assert result.prompts is not None
            self._session.log_sizing(self.name)
            counts = {"skipped_rounds": self.skipped_rounds}
            self._reporter.report(step, result.prompts, result.generation, counts, result.requests)

    def _read_prompts(self, step: int, limits: ModelLimits | None) -> RoundPrompts:
        """The prompts of the round after a step."""
        return with_drafts(read_round_prompts(self.config, self._tokenizer, step, limits), self._earlier)

    def _run_tasks(self, tasks: TaskRounds, step: int, model: Any) -> None:
        """A round of tasks; where it fails, all hosts go on with training, or raise, as after a round of samples."""
        before, self.tasks_left, self.last_tasks = self.last_tasks, None, step
        try:
            with own_settings():
                done = tasks.run(step, model)
        except (PeerError, DisagreementError) as error:
            if self.config.on_error == "raise":
                raise
            self._task_errors_in_a_row += 1
            if self._hosts.is_leader:
                log.error("%s: the tasks after step %d are skipped on every host: %s", self.name, step, error)
                if self._task_errors_in_a_row == self.config.max_consecutive_errors:
                    log.error(
                        "%s: %d rounds of tasks in a row failed (max_consecutive_errors): no more are run",
                        self.name,
                        self._task_errors_in_a_row,
                    )
                self._reporter.log(step, {"skipped_task_rounds": tasks.skipped_rounds})
            return
        self._task_errors_in_a_row = 0
        if not done:
            self.tasks_left, self.last_tasks, self.interrupted = step, before, True
            if self._hosts.is_leader:
                log.warning("%s: the job is asked to end: no tasks after step %d", self.name, step)

    def _warn(self, text: str) -> None:
        if text and self._hosts.is_leader:
            log.warning("%s: %s", self.name, text)

    def _skip(self, step: int, error: HostError) -> None:
        """Count a failed round, the same on every host, and raise ``error`` again where the configuration says so."""
        self.skipped_rounds += 1
        if self.config.on_error == "raise":
            raise error
        self._errors_in_a_row += 1
        self.switched_off = self._errors_in_a_row == self.config.max_consecutive_errors
        if not self._hosts.is_leader:
            return
        log.error("%s: the round after step %d is skipped on every host: %s", self.name, step, error)
        if self.switched_off:
            log.error(
                "%s: %d rounds in a row failed (max_consecutive_errors): sampling is switched off for the rest of the "
                "run; training goes on",
                self.name,
                self._errors_in_a_row,
            )
        self._reporter.log(step, {"skipped_rounds": self.skipped_rounds})
