"""The scheduler: a pure function of the requests and of the tokens that came back, run alike on every host."""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from lockstep.schedule.capacity import check_capacity
from lockstep.schedule.plan import DecodePlan, PrefillPlan, ScheduleSizes
from lockstep.schedule.prefix import page_keys
from lockstep.schedule.replica import Replica
from lockstep.schedule.sequence import Sequence
from lockstep.types import Completion, Request


class Scheduler:
    """Continuous batching over replicas: admits waiting sequences, prefills them page by page, decodes the rest.

    A sequence is admitted when a replica has a slot and pages for its worst case, longest-waiting first, so nothing
    that was admitted can run out of pages.

    Args:
        sizes: capacities.
        requests: all prompts to answer.

    Raises:
        CapacityError: a request can never fit, whatever finishes before it.
    """

    def __init__(self, sizes: ScheduleSizes, requests: Seq[Request]) -> None:
        check_capacity(sizes, requests)
        self.sizes = sizes
        self._sequences = []
        for request in requests:
            # Only what prefill writes can be shared: the page of the prompt's last token is written by decode.
            keys = page_keys(request.prompt_tokens[:-1], sizes.page_size)
            for generation in range(request.params.n_generations):
                self._sequences.append(Sequence(request=request, generation_id=generation, prefix_keys=keys))
        self._waiting = deque(self._sequences)
        self._replicas = [Replica(i, sizes) for i in range(sizes.replicas)]

    @property
    def done(self) -> bool:
        """Whether every sequence is finished."""
        return not self._waiting and not any(replica.busy for replica in self._replicas)

    def completions(self) -> list[Completion]:
        """All answers, in the order of the requests, then of the generations."""
        assert self.done
        return [sequence.completion() for sequence in self._sequences]

    def next_plan(self) -> PrefillPlan | DecodePlan | None:
        """Admits what fits and says what to launch next; None when all is done. A DecodePlan must be committed."""
        self._admit()
        if any(replica.prefilling for replica in self._replicas):
            return self._plan_prefill()
        if self.done:
            return None
        return self._plan_decode()

    def commit(
        self,
        plan: DecodePlan,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        sampled_logprobs: np.ndarray | None = None,
        top_ids: np.ndarray | None = None,
        top_logprobs: np.ndarray | None = None,
    ) -> None:
        """Takes the results of a decode launch.

        Args:
            plan: of the launch.
            tokens: ``[replica, slot, step]``, -1 where a sequence had already ended.
            logprobs: of the tokens under the model.
            sampled_logprobs: of the tokens under the distribution that they were drawn from; None for zeros.
            top_ids: ``[replica, slot, step, n]``, most probable first; None where no sequence asks for them.
            top_logprobs: of ``top_ids``.
        """
        if sampled_logprobs is None:
            sampled_logprobs = np.zeros_like(logprobs)
        for r, replica in enumerate(self._replicas):
            for slot, sequence in enumerate(replica.slots):
                if sequence is None or plan.remaining[r, slot] == 0:
                    continue
                count = sequence.request.params.top_logprobs
                drawn = zip(tokens[r, slot], logprobs[r, slot], sampled_logprobs[r, slot], strict=True)
                for step, (token, logprob, sampled_logprob) in enumerate(drawn):
                    if token < 0 or sequence.finish_reason is not None:
                        break
                    top: tuple[tuple[int, float], ...] = ()
                    if count:
                        assert top_ids is not None and top_logprobs is not None
                        at = (r, slot, step, slice(count))
                        top = tuple(zip(top_ids[at].tolist(), top_logprobs[at].tolist(), strict=True))
                    sequence.append(int(token), float(logprob), float(sampled_logprob), top)
                if sequence.finish_reason is not None:
                    replica.release(sequence)

    @property
    def _num_active(self) -> int:
        return sum(self.sizes.slots - replica.num_free_slots for replica in self._replicas)

    def _admit(self) -> None:
        while self._waiting and self._num_active < self.sizes.sequences:
            sequence = self._waiting[0]
            fitting = [i for i, replica in enumerate(self._replicas) if replica.fits(sequence)]
            if not fitting:
                return  # longest-waiting first: nobody overtakes
            index = max(fitting, key=lambda i: (self._replicas[i].num_free_slots, -i))
            self._replicas[index].admit(self._waiting.popleft())

    def _plan_prefill(self) -> PrefillPlan:
        sizes = self.sizes
        plan = PrefillPlan.empty(sizes)
        for r, replica in enumerate(self._replicas):
            for row, (sequence, start) in enumerate(replica.take_prefill_rows(sizes.prefill_rows)):
                end = min(start + sizes.page_size, sequence.num_prefill)
                plan.tokens[r, row, : end - start] = sequence.request.prompt_tokens[start:end]
                plan.start[r, row] = start
                plan.page[r, row] = sequence.pages[start // sizes.page_size]
                plan.page_table[r, row, : len(sequence.pages)] = sequence.pages
        return plan

    def _plan_decode(self) -> DecodePlan:
        sizes = self.sizes
        active = [s for replica in self._replicas for s in replica.slots if s is not None]
        # While others wait, a launch ends with its shortest sequence, so that the freed slot is used at once.
        bound = min if self._waiting else max
        plan = DecodePlan.empty(sizes, min(sizes.steps, bound(s.remaining for s in active)))
        for sequence in active:
            at = (sequence.replica, sequence.slot)
            params = sequence.request.params
            plan.token[at] = sequence.last_token
            plan.position[at] = sequence.position
            plan.remaining[at] = sequence.remaining
            plan.page_table[at][: len(sequence.pages)] = sequence.pages
            plan.stop_ids[at][: len(params.stops)] = params.stops
            plan.draw[at] = (params.seed, sequence.request.prompt_id, sequence.generation_id)
            plan.temperature[at] = params.temperature
            plan.sampling.set(at, sequence)
        return plan
