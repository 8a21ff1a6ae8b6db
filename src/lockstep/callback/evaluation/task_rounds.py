"""Rounds of tasks in a run: each asks the harness, and what fails in one harms neither training nor the next."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.callback.evaluation.config import TasksConfig
from lockstep.callback.evaluation.harness import Harness
from lockstep.callback.evaluation.harness_thread import HarnessThread
from lockstep.callback.evaluation.results import TaskResults
from lockstep.callback.evaluation.round import run_tasks
from lockstep.credentials import get_logger
from lockstep.engine import Engine, EngineConfig
from lockstep.errors import DisagreementError, LockstepError, PeerError
from lockstep.hosts import Hosts, Watchdog, digest
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder
from lockstep.placement import mesh_of
from lockstep.text import StopFinder, check_vocab, token_count, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

type Report = Callable[[int, TaskResults | Exception], object]
"""Takes what a round found after a step, or what failed after the hosts had gone on; called in the harness's thread."""


class TaskRounds:
    """Runs the tasks of a configuration on all hosts, again and again; every host makes the same calls.

    It has an engine of its own, so that rounds of samples have the programs and the capacities that they have without
    tasks. Between rounds it keeps compiled programs and nothing else on the devices.

    Args:
        name: The prefix of scopes and messages.
        config: The settings of the tasks.
        engine: The capacities and the layout.
        tokenizer: A Hugging Face tokenizer.
        report: What takes the results, on the leader.
        hosts: The processes of the job.
        timeout_s: The seconds that a wait for other hosts or a device call may last.
        max_seconds: The seconds that a round may last where the configuration does not say.
    """

    def __init__(
        self,
        name: str,
        config: TasksConfig,
        engine: EngineConfig,
        tokenizer: "PreTrainedTokenizerBase",
        report: Report,
        hosts: Hosts,
        timeout_s: float,
        max_seconds: float = math.inf,
    ) -> None:
        self.config = config
        self.max_seconds = max_seconds if config.max_seconds is None else config.max_seconds
        """The seconds that a round may last."""
        self.rounds = 0
        """Rounds whose requests were all answered."""
        self.skipped_rounds = 0
        """Rounds that failed, or ran out of time, and were given up on every host."""
        self._name, self._engine_config, self._tokenizer, self._report = name, engine, tokenizer, report
        self._hosts, self._timeout_s = hosts, timeout_s
        self._harness = Harness(config, tokenizer)
        self._thread: HarnessThread[TaskResults] | None = None
        self._engine: Engine | None = None
        self._find_stop = StopFinder(tokenizer)
        self._watchdog = Watchdog(hosts, timeout_s)
        self._vocab_size = token_count(tokenizer)
        self._facts = {
            "tasks": digest(json.dumps([dataclasses.asdict(config), dataclasses.asdict(engine)], sort_keys=True)),
            "tokenizer": tokenizer_digest(tokenizer),
        }

    @property
    def engine(self) -> Engine | None:
        """The engine, or None before the first round."""
        return self._engine

    def check(self) -> None:
        """Find out what would make every round fail; called on the leader alone.

        Raises:
            ConfigError: The harness is not installed, or a task is not known.
        """
        self._harness.check()

    def run(self, step: int, model: Any) -> bool:
        """Run the tasks after a step.

        Args:
            step: The number of training steps completed.
            model: What `lockstep.models.read_decoder` reads; it is not kept.

        Returns:
            False where the job is asked to end, and the round was aborted on every host.

        Raises:
            PeerError, DisagreementError: The round failed; the same on every host.
            LaunchMismatchError: Hosts launched different programs; the same on every host.
            HostTimeoutError: A host is missing.
        """
        try:
            with self._hosts.scope(f"{self._name}/tasks", self._timeout_s) as hosts:
                done = run_tasks(
                    hosts,
                    facts={"step": str(step), **self._facts},
                    engine=lambda: self._engine_for(model),
                    harness=lambda read: self._start(step, read),
                    find_stop=self._find_stop,
                    max_seconds=self.max_seconds,
                    watchdog=self._watchdog,
                )
        except (PeerError, DisagreementError):
            self.skipped_rounds += 1
            raise
        self.rounds += done
        return done

    def wait(self, timeout_s: float) -> bool:
        """Wait until the last round is scored, on the leader; elsewhere there is nothing to wait for.

        Args:
            timeout_s: The most seconds to wait.

        Returns:
            Whether it is.
        """
        return self._thread is None or self._thread.wait(timeout_s)

    def _start(self, step: int, read: tuple[LlamaConfig, DecoderWeights]) -> HarnessThread[TaskResults]:
        if self._thread is not None and self._thread.alive:
            raise LockstepError(
                "the harness still works on an earlier round: it scores slowly, or hangs. Run the tasks less often "
                "(tasks.every), or lower tasks.limit."
            )
        length = read[0].max_seq_len  # the thread keeps this alone, and no array

        def done(result: TaskResults | None, error: Exception | None) -> None:
            found = error if result is None else result
            assert found is not None
            self._report(step, found)

        self._thread = HarnessThread(lambda ask: self._harness.run(ask, step, length), done)
        return self._thread

    def _engine_for(self, model: Any) -> tuple[Engine, tuple[LlamaConfig, DecoderWeights]]:
        read = read_decoder(model)
        weights = read[1]
        check_vocab(self._tokenizer, weights.embed.shape[0])
        mesh = mesh_of(weights.embed)
        if self._engine is None or self._engine.mesh != mesh:
            self._engine = Engine(self._engine_config, mesh, vocab_size=self._vocab_size, ledger=self._hosts.ledger)
        return self._engine, read
