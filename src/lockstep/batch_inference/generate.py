"""A round of prompts streams through the engine, batch after batch on disk: in lockstep, or every host for itself."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator as Answers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from lockstep.batch_inference.config import SampleConfig
from lockstep.batch_inference.job_progress import Meter
from lockstep.batch_inference.prompt_store import Batch, JobShape, PromptStore, batches, prompts_per_batch
from lockstep.batch_inference.row_files import RowFile
from lockstep.engine import EarlierAnswers, Engine, Observer, Session
from lockstep.engine.schedule import Scheduler
from lockstep.health import Vocabulary, measure_health
from lockstep.hosts import Hosts, Ledger, Watchdog, digest, environment, leader_only, try_leader_only
from lockstep.printable import get_logger
from lockstep.report import Metric, SampleRow, load_metrics, measure
from lockstep.text import StopFinder, token_count
from lockstep.text.stop import AnswerDecoder
from lockstep.types import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)


class Generator:
    """Generates the rows of a job that this host takes part in."""

    def __init__(
        self,
        hosts: Hosts,
        config: SampleConfig,
        store: PromptStore,
        tokenizer: "PreTrainedTokenizerBase",
        stop_ids: tuple[int, ...],
    ) -> None:
        self._hosts, self._config, self._store, self._tokenizer = hosts, config, store, tokenizer
        self._decoded = AnswerDecoder(tokenizer)
        self._params = [config.sampling_params(stop_ids, round_) for round_ in range(config.n_rounds)]
        self._metrics: Mapping[str, Metric] = load_metrics(config.metrics)
        self._earlier = EarlierAnswers(config.drafts)
        find_stop = StopFinder(tokenizer) if config.stop else None
        self._session = Session(self._make_engine, find_stop=find_stop, watchdog=Watchdog(hosts, hosts.timeout_s))
        self.lockstep = config.inference_mode == "global_mesh"  # whether all hosts work on the same prompts
        self.batch_prompts = 0  # prompts whose answers are written together, about; known after `prepare`
        self._free = 0
        self._model: Any = None  # as it was read

    @property
    def engine(self) -> Engine | None:
        """The engine, or None before `prepare`."""
        engine: Engine | None = self._session.engine
        return engine

    @property
    def floor(self) -> float:
        """Tokens per second that the memory bandwidth of this host's engine allows, as predicted; 0 if unknown."""
        sizing = self.engine.sizing if self.engine else None
        return sizing.estimate.active / sizing.estimate.step_s if sizing else 0.0

    def prepare(self, model: Any, mesh: Mesh, shape: JobShape, units: Int[np.ndarray, " pending"]) -> None:
        """Choose capacities, compile, and agree, before anything is launched; every host calls it.

        Args:
            units: The units of this host, in the order of `pending_units`; may be none where hosts work for
                themselves.

        Raises:
            PeerError: A host cannot work with this configuration; raised on every host.
            DisagreementError: The hosts compiled different programs.
        """
        with self._hosts.scope("engine") as scope:
            self._model, self._free, _ = self._session.measure(scope, model, environment())
            engine = self.engine
            assert engine is not None
            with scope.run_on_all("prepare") as prepared:
                first = self._probe(engine, mesh, shape, units)
                digests = engine.prepare(self._model, first, free=self._free) if first else {}
                if self.lockstep:
                    prepared.agree({"batch": str(self.batch_prompts), **digests})

    def _make_engine(self, mesh: Mesh, ledger: Ledger) -> Engine:
        config = self._config
        longest = int(self._store.lengths.max()) + config.max_new_tokens
        window = config.max_prompts_per_batch or config.engine.max_prompts_per_batch
        capacities = dataclasses.replace(config.engine, max_seq_len=longest, max_prompts_per_batch=window)
        # Where hosts work for themselves, their launches are not the job's.
        own = ledger if self.lockstep else None
        return Engine(capacities, mesh, vocab_size=token_count(self._tokenizer), ledger=own)

    def run(
        self, shape: JobShape, units: Int[np.ndarray, " pending"], rows: RowFile | None, meter: Meter | None
    ) -> None:
        """Generate units and write their rows.

        Raises:
            PeerError: The hosts work in lockstep and one of them failed; raised on every host.
            DisagreementError: The hosts work in lockstep and computed different tokens.
        """
        for work in batches(shape, units, max(1, len(units))):
            with contextlib.closing(self._answers(work, meter)) as answers:
                for completions in answers:
                    if meter is not None:
                        meter.pause()
                    self._write(work.round, completions, rows)

    def _write(self, round_: int, completions: Sequence[Completion], rows: RowFile | None) -> None:
        def write() -> None:
            if rows is not None:
                with leader_only():
                    rows.append([row.to_dict() for row in self._rows(round_, completions)])

        if self.lockstep:
            with self._hosts.run_on_all("write rows"):
                write()
        else:
            write()
        self._hosts.note_saved()

    def _probe(self, engine: Engine, mesh: Mesh, shape: JobShape, units: Int[np.ndarray, " pending"]) -> list[Request]:
        """The first batch; its size follows from the sequences that fit at a time."""
        config = self._config
        if not len(units):
            return []
        enough = next(batches(shape, units, 1 + (engine.config.max_seqs or 64 * mesh.size)))
        sizes = engine.check(self._model, self._requests(enough), free=self._free)
        self.batch_prompts = prompts_per_batch(
            sizes.sequences, config.n_generations, config.max_new_tokens, config.max_prompts_per_batch
        )
        return self._requests(next(batches(shape, units, self.batch_prompts)))

    def _requests(self, batch: Batch) -> list[Request]:
        return [self._request(batch.round, number) for number in batch.prompts]

    def _request(self, round_: int, number: int) -> Request:
        return Request(
            prompt_id=number,
            prompt_tokens=self._store[number].tokens,
            params=self._params[round_],
            drafts=self._earlier.drafts(number),
        )

    def _answers(self, work: Batch, meter: Meter | None) -> Answers[list[Completion], None, None]:
        """The completions of a round, about a batch of prompts at a time.

        No slot waits for the end of a batch, and weights are moved once. In lockstep a batch comes when all hosts have
        agreed on its tokens.
        """
        n_generations = self._config.n_generations
        if meter is not None:
            meter.begin()
        # Longest first, so the first batch needs as much as any.
        first = self._requests(dataclasses.replace(work, prompts=work.prompts[: self.batch_prompts]))
        with self._hosts.scope("round") if self.lockstep else contextlib.nullcontext() as scope:
            batches_of_answers = self._session.stream(
                scope,
                self._model,
                (self._request(work.round, number) for number in work.prompts),
                largest=first,
                free=self._free,
                batch=self.batch_prompts * n_generations,
                facts={"prompts": digest(repr(work))},
                observer=None if meter is None else _Shown(meter, n_generations),
            )
        return batches_of_answers

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.from_tokenizer(self._tokenizer)

    def _rows(self, round_: int, completions: Sequence[Completion]) -> list[SampleRow]:
        """Rows of a batch by prompt and generation, so that a file reads in order as far as it can."""
        rows, prompts, answers = [], [], []
        for completion in sorted(completions, key=lambda completion: (completion.prompt_id, completion.generation_id)):
            asked = self._store[completion.prompt_id]
            prompts.append(asked.prompt)
            text, end = self._decoded(completion.tokens, asked.tokens, self._config.stop)
            rows.append(
                SampleRow.from_completion(
                    completion,
                    asked.prompt,
                    text,
                    keep_tokens=self._config.keep_tokens,
                    prompt_end=end,
                    round=round_,
                )
            )
            answers.append(rows[-1].answered(asked.prompt, completion, asked.tokens))

        def look() -> None:
            # By itself: which answers are in a batch depends on the layout, and rows do not.
            health = [measure_health(answer, self._vocabulary) for answer in answers]
            rows[:] = [row.with_health(own) for row, own in zip(rows, health, strict=True)]

        if self._config.health:
            try_leader_only("the health of answers", look, "sampling goes on")
        measured, failures = measure(self._metrics, rows, prompts, guard=leader_only)
        for failure in failures:
            log.error("round %d: %s; sampling goes on", round_, failure)
        return measured


@dataclasses.dataclass(frozen=True)
class _Shown(Observer):
    """Shows in a live view how far a round is."""

    meter: Meter
    n_generations: int

    def between_launches(self, scheduler: Scheduler) -> None:
        try:
            with leader_only():
                self.meter(scheduler)
        except Exception as error:  # a view that fails on one host must not part it from the others
            log.warning("the live view failed: %s: %s", type(error).__name__, error)

    def answered(self, completions: Sequence[Completion]) -> None:
        self.meter.add_prompts(len(completions) // self.n_generations)
