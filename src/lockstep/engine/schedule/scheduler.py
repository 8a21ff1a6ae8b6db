"""The scheduler: a pure function of the requests and of the sampled tokens, so that every host computes the same."""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from lockstep.engine.schedule.batch import (
    Batch,
    Capacity,
    CopyPagesBatch,
    DecodeBatch,
    PrefillBatch,
    PromptLogprobsBatch,
    VerifyBatch,
    num_decode_steps,
)
from lockstep.engine.schedule.drafts import Drafter
from lockstep.engine.schedule.intake import Admission, FindStop, Intake
from lockstep.engine.schedule.replica import (
    DecodeSlots,
    PromptLogprobsRow,
    Replica,
    copy_pages_batch,
    prefill_batch,
    prompt_logprobs_batch,
)
from lockstep.engine.schedule.sequence import Counts, DecodeResults, RoutedShape, Sequence
from lockstep.errors import ConfigError
from lockstep.types import Completion, FinishReason, Request


class Scheduler:
    """Continuous batching over replicas: admits waiting sequences, prefills them page by page, decodes the rest.

    Continuous batching is iteration-level scheduling (Yu et al. 2022, Orca,
    https://www.usenix.org/conference/osdi22/presentation/yu), here for launches of several steps. A sequence is
    admitted, longest-waiting first, when a replica has a slot and pages for its worst case, so that no admitted
    sequence can run out of pages.

    Args:
        requests: The requests to answer; an iterator is read only as far as ``max_prompts`` allows, and may give None
            where it has none for now: it is asked again later.
        find_stop: The function that finds stop strings; needed if a request has any.
        share_prefixes: Whether sequences with a common prefix share its pages.
        max_prompts: The most prompts to have at a time, waiting and being answered; None for all.
        verify_costs: The time of a step that verifies drafts, in decode steps, by its width: the same on every host.
            Needed where the capacity has programs that verify.
        routed: The form of the experts in results, where the programs report them.

    Raises:
        CapacityError: A request can never fit, whatever finishes before it.
        ConfigError: A request has stop strings and there is no ``find_stop``.
    """

    def __init__(
        self,
        capacity: Capacity,
        requests: Iterable[Request | None],
        find_stop: FindStop | None = None,
        *,
        share_prefixes: bool = True,
        max_prompts: int | None = None,
        verify_costs: Mapping[int, float] | None = None,
        routed: RoutedShape | None = None,
    ) -> None:
        self.capacity = capacity
        self._drafter = Drafter(capacity, verify_costs or {}) if capacity.verify_widths else None
        self._find_stop = find_stop
        self._max_prompts = max_prompts
        self._intake = Intake(capacity, requests, find_stop, share_prefixes=share_prefixes, routed=routed)
        self._sequences: list[Sequence] = []
        self._unanswered: dict[int, int] = {}
        self._waiting: deque[Sequence] = deque()
        self._rows_in_flight: list[PromptLogprobsRow] = []
        self._replicas = [Replica(i, capacity, share_prefixes=share_prefixes) for i in capacity.active_replicas]
        self._admission = Admission(capacity, self._replicas)
        self._by_index = {replica.index: replica for replica in self._replicas}
        self._slots = DecodeSlots(capacity)
        self._num_active, self._admits_more = 0, False
        self._finished, self._stopped = 0, 0
        self._just_finished: list[Sequence] = []
        self._sampled = np.zeros(capacity.replicas, np.int64)
        self._cached: dict[int, int] = {}  # tokens that the last turn of each conversation had in the cache
        self._prefilled_again = 0
        self._read()

    @property
    def done(self) -> bool:
        """Whether every sequence is finished and no request is left to read, nor will come."""
        return self._intake.ended and not self._waiting and not self._num_active

    @property
    def starved(self) -> bool:
        """Whether every request that was read is answered, and more are to come."""
        return not (self._unanswered or self._intake.ended)

    @property
    def counts(self) -> Counts:
        """The progress so far."""
        allocators = [replica.allocator for replica in self._replicas]
        max_pages = sum(allocator.num_pages - 1 for allocator in allocators)
        return Counts(
            finished=self._finished,
            tokens=tuple(self._sampled.tolist()),
            pages=max_pages - sum(allocator.num_free for allocator in allocators),
            max_pages=max_pages,
            steps=self._drafter.steps if self._drafter else int(self._sampled.sum()),
            drafted=self._drafter.looked_at if self._drafter else 0,
            right=self._drafter.right if self._drafter else 0,
            prefilled=sum(replica.num_prefilled for replica in self._replicas),
            prefilled_again=self._prefilled_again,
        )

    def completions(self) -> list[Completion]:
        """Return all answers that were not taken, in the order of the requests, then of the generations."""
        assert self.done
        return [sequence.completion() for sequence in self._sequences]

    def take_answered(self) -> list[Completion]:
        """Return and remove the answers of prompts that have all of theirs, in the order of the requests."""
        answered = [s for s in self._sequences if s.request.prompt_id not in self._unanswered]
        if answered:
            self._sequences = [s for s in self._sequences if s.request.prompt_id in self._unanswered]
        return [sequence.completion() for sequence in answered]

    def unfinished(self) -> list[tuple[int, int]]:
        """Return (prompt_id, generation_id) of every sequence that waits or is decoded, longest-waiting first."""
        return [(s.request.prompt_id, s.generation_id) for s in self._sequences if s.finish_reason is None]

    def tokens_so_far(self, prompt_id: int, generation_id: int) -> tuple[int, ...]:
        """Return the tokens sampled so far of an answer, finished or not.

        Raises:
            ConfigError: There is no such sequence.
        """
        return tuple(self._find(prompt_id, generation_id).tokens)

    def cancel(self, prompt_id: int, generation_id: int) -> None:
        """End a sequence between two launches, with the tokens that it has; its slot and pages are free at once.

        All other sequences go on as if it had ended by itself. A finished sequence stays as it is.

        Raises:
            ConfigError: There is no such sequence.
        """
        sequence = self._find(prompt_id, generation_id)
        if sequence.finish_reason is not None:
            return
        if self._admits_more:
            self._admit(all_that_fit=True)
        sequence.finish_reason = FinishReason.CANCELLED
        self._ended(sequence)
        if sequence.replica < 0:
            self._waiting.remove(sequence)
        else:
            self._slots.clear((sequence.replica, sequence.slot))
            self._release(sequence)

    def abort(self, reason: FinishReason) -> None:
        """End all unfinished sequences between two launches, with the tokens that they have, and free all pages.

        Requests that were not read yet are read now, and end too.
        """
        while self._read_one() is not None:
            pass
        self._intake.close()
        self._waiting.clear()
        self._unanswered.clear()
        for sequence in self._sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                self._finished += 1
        for replica in self._replicas:
            replica.release_all()
            self._admission.update(replica)
        self._num_active = 0

    def forget(self, conversation: int) -> None:
        """End a conversation between two launches: the K/V that its turns have left is free."""
        if self._cached.pop(conversation, None) is not None:
            for replica in self._replicas:
                replica.forget(conversation)
                self._admission.update(replica)

    def next_batch(self) -> Batch | None:
        """Admit waiting sequences that fit and return the batch of the next launch; None when there is nothing to do:
        all is `done`, or requests are still to come.

        The results of a `DecodeBatch` or `VerifyBatch` must be given to `commit`, those of a `PromptLogprobsBatch` to
        `commit_prompt_logprobs`, before the next call.
        """
        if len(self._waiting) < self.capacity.sequences - self._num_active:
            self._read()
        self._admit()
        if any(replica.prefilling for replica in self._replicas):
            return prefill_batch(self.capacity, self._replicas)
        if any(replica.copying for replica in self._replicas):
            return copy_pages_batch(self.capacity, self._replicas)
        if self.capacity.prompt_logprobs:
            batch, self._rows_in_flight = prompt_logprobs_batch(self.capacity, self._replicas)
            if self._rows_in_flight:
                return batch
        if not self._num_active:
            assert not self._waiting
            return None
        waiting = bool(self._waiting) or not self._intake.ended
        stop_rate = self._stop_rate if self._slots.may_stop else 0.0
        if self._drafter is not None:
            verified = self._drafter.batch(self._slots, waiting=waiting, stop_rate=stop_rate)
            if verified is not None:
                return verified
        steps = num_decode_steps(self._slots.remaining, self.capacity.steps, waiting=waiting, stop_rate=stop_rate)
        return self._slots.batch(steps)

    def work_ahead(self) -> None:
        """Do what needs no results, for the time in which the devices work: completions, and reading requests.

        Every host must call it at the same places. Nothing depends on it but when the work is done, and where sequences
        go.
        """
        for sequence in self._just_finished:
            sequence.completion()
        self._just_finished = []
        self._read()

    def commit(self, batch: DecodeBatch | VerifyBatch, results: DecodeResults) -> None:
        """Take the results of a decode launch.

        Args:
            results: What each slot sampled; of a launch that verifies drafts, the step of each token too.
        """
        step = None
        if isinstance(batch, VerifyBatch):
            batch, (results, step) = batch.decode, results.split_steps()
        at = np.nonzero(batch.remaining)
        sequences: list[Sequence] = self._slots.sequences[at].tolist()
        looks = self._slots.has_stop_strings[at]
        counts, stopped = (array[at] for array in self._slots.advance(results))
        kept = counts.copy()
        sampled = results.packed.swapaxes(1, 2)[at]  # [sequence, part, step], a copy
        for sequence, count, part in zip(sequences, counts.tolist(), sampled, strict=True):
            sequence.extend(part[:, :count])

        ended = stopped | (counts == batch.remaining[at])
        for index in np.flatnonzero(ended | looks).tolist():
            sequence = sequences[index]
            if ended[index]:
                sequence.finish_reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
            if looks[index] and (cut := self._cut_at_stop(sequence, int(counts[index]))) is not None:
                ended[index] = True
                kept[index] -= cut
            if ended[index]:
                self._stopped += sequence.finish_reason is FinishReason.STOP
                self._release(sequence)
                self._ended(sequence)
                self._just_finished.append(sequence)
        self._slots.clear((at[0][ended], at[1][ended]))
        self._sampled += np.bincount(at[0], kept, self.capacity.replicas).astype(np.int64)
        if self._drafter is not None:
            self._drafter.learn(at, kept, results.tokens, step)

    def _cut_at_stop(self, sequence: Sequence, new: int) -> int | None:
        """End a sequence whose last ``new`` tokens complete a stop string; return how many came after it, if any."""
        assert self._find_stop is not None
        request = sequence.request
        end = self._find_stop(sequence.tokens, sequence.num_tokens - new, request.params.stop, request.prompt_tokens)
        if end is None:
            return None
        cut = sequence.num_tokens - end
        sequence.stop_at(end)
        return cut

    def commit_routed(self, batch: PrefillBatch | CopyPagesBatch, words: np.ndarray | None = None) -> None:
        """Take the experts of prompts (`Replica.commit_routed`), before the results of the next decode launch."""
        for replica in self._replicas:
            replica.commit_routed(batch, words)

    def commit_prompt_logprobs(
        self,
        batch: PromptLogprobsBatch,
        logprobs: np.ndarray,
        top_ids: np.ndarray | None = None,
        top_logprobs: np.ndarray | None = None,
    ) -> None:
        """Take the results of a launch that computed log-probabilities of prompts.

        Args:
            logprobs: The log-probabilities of the batch's targets, ``[replica, row, position]``.
            top_ids: The ids of the most probable tokens ``[replica, row, position, n]``, most probable first; None
                where no sequence asks for them.
        """
        for r, row, record in self._rows_in_flight:
            count = int((batch.targets[r, row] >= 0).sum())
            ids, values = (None if part is None else part[r, row, :count] for part in (top_ids, top_logprobs))
            record.add(logprobs[r, row, :count], ids, values)
        self._rows_in_flight = []

    def _read(self) -> None:
        """Read requests until there are ``max_prompts`` unanswered prompts."""
        while self._max_prompts is None or len(self._unanswered) < self._max_prompts:
            if self._read_one() is None:
                return

    def _read_one(self) -> list[Sequence] | None:
        """Read the next request and return its sequences; None if there is none."""
        sequences = self._intake.next_sequences()
        if sequences is None:
            return None
        prompt_id = sequences[0].request.prompt_id
        assert prompt_id not in self._unanswered
        self._unanswered[prompt_id] = len(sequences)
        self._sequences += sequences
        self._waiting += sequences
        return sequences

    def _ended(self, sequence: Sequence) -> None:
        """Count a finished sequence; its prompt is answered when it was the last."""
        prompt_id = sequence.request.prompt_id
        self._finished += 1
        self._unanswered[prompt_id] -= 1
        if not self._unanswered[prompt_id]:
            del self._unanswered[prompt_id]

    def _find(self, prompt_id: int, generation_id: int) -> Sequence:
        """Return a sequence; read further requests until it is there."""
        unseen: Seq[Sequence] | None = self._sequences
        while unseen is not None:
            for sequence in unseen:
                if (sequence.request.prompt_id, sequence.generation_id) == (prompt_id, generation_id):
                    return sequence
            unseen = self._read_one()
        raise ConfigError(
            f"prompt {prompt_id} generation {generation_id} is not among the {len(self._sequences)} sequences of this "
            "run. Use a (prompt_id, generation_id) that unfinished() lists."
        )

    def _release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of an ended sequence."""
        replica = self._by_index[sequence.replica]
        replica.release(sequence)
        if sequence.conversation is not None and sequence.num_cached:
            self._cached[sequence.conversation] = sequence.num_cached
        self._admission.update(replica)
        self._num_active -= 1

    @property
    def _stop_rate(self) -> float:
        """The part of the tokens so far that ended their sequence before its last."""
        return (self._stopped + 1) / (int(self._sampled.sum()) + self.capacity.steps)

    def _admit(self, *, all_that_fit: bool = False) -> None:
        """Admit the longest-waiting sequences: as many as fit, or as fill the next launch of prefill everywhere.

        The others are admitted while the devices work on that launch. They go where they would have gone before it: no
        slot or page becomes free until all prefill is done, but by `cancel`, which admits them first.
        """
        slots = min(self.capacity.sequences, len(self._replicas) * self.capacity.slots)
        unfilled = {replica.index for replica in self._replicas if all_that_fit or not replica.fills_prefill}
        self._admits_more = not unfilled
        while self._waiting and self._num_active < self.capacity.sequences and not self._admits_more:
            sequence = self._waiting[0]
            crowded = len(self._waiting) >= slots - self._num_active
            cached = 0 if sequence.conversation is None else self._cached.get(sequence.conversation, 0)
            replica = self._admission.choose(sequence, crowded=crowded or cached > 0)
            if replica is None:
                return  # longest-waiting first: no sequence overtakes another
            replica.admit(self._waiting.popleft())
            self._prefilled_again += max(0, min(cached, sequence.num_prefill) - sequence.num_prefilled)
            self._admission.update(replica)
            self._num_active += 1
            self._slots.put(sequence)
            if self._drafter is not None:
                self._drafter.put(sequence)
            if replica.fills_prefill and not all_that_fit:
                unfilled.discard(replica.index)
                self._admits_more = not unfilled
