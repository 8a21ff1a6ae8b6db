"""Drafts of the next tokens: what to guess for each sequence, and how much of it is worth verifying.

Everything here is a pure function of the requests and of the sampled tokens, in additions, multiplications and
divisions that are exact to the last bit on every CPU: every host chooses the same program.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Float, Int, Int32

from lockstep.engine.schedule.batch import Capacity, VerifyBatch, num_decode_steps
from lockstep.engine.schedule.ngrams import Ngrams
from lockstep.engine.schedule.replica import DecodeSlots
from lockstep.engine.schedule.sequence import Sequence
from lockstep.types import Drafts

_MATCHED = (3, 2)
"""Tokens that must be the same for an answer to go on elsewhere in its draft, the longest first."""
_COMPARED = 16
"""The last tokens of an answer that decide whether it still is side by side with the draft."""
_LEAST_GAIN = 1.05
"""The speed-up over decode that verifying must promise."""
_RECENT = 64.0
"""Tokens of a sequence that its share of right ones is taken of, about."""
_PRIOR_RIGHT, _PRIOR = 6.0, 8.0
"""The prior of a run: right tokens, and guessed ones."""
_RISK = 0.04
"""The part of the remaining steps that a step may waste on drafts of which nothing is known."""
_OF_RUN = 2.0
"""Tokens that the run's share of right ones counts for in that of a sequence."""
_FIRST, _GROWTH = 8, 4
"""Tokens of a sequence that the first launch verifies at most, and how many more for each that was looked at."""


class Proposer:
    """Guesses the next tokens of one sequence.

    Args:
        ngrams: The texts to look up the last tokens in, shared by all generations; None for none.
    """

    def __init__(self, drafts: Drafts, generation_id: int, ngrams: Ngrams | None = None) -> None:
        self._draft = np.array(drafts.answer(generation_id), np.int32)
        self._generation_id, self._ngrams = generation_id, ngrams
        self._shift = 0
        """The number of draft tokens with no counterpart in the answer, so that the rest of both is side by side."""

    def add(self, tokens: Seq[int]) -> None:
        """Take what the sequence sampled.

        Args:
            tokens: The token ids, those that earlier calls had left out.
        """
        if self._ngrams is not None:
            self._ngrams.add(self._generation_id, tokens)

    def propose(self, answer: Seq[int], count: int) -> Int32[np.ndarray, " token"]:
        """Return a guess at the tokens that follow an answer; at most ``count``, none where nothing suggests any."""
        at = len(answer) + self._shift
        agreement = self._agreement(answer, at)
        # Where the last tokens are mostly the same, one that is not was most often replaced by another.
        if 2 * agreement < min(len(answer), _COMPARED):
            place = _after(self._draft, answer, near=at)
            if place is not None and self._agreement(answer, place) > agreement:
                at, self._shift = place, place - len(answer)
            elif len(looked_up := self._look_up(count)):
                return looked_up
        draft = self._draft[max(at, 0) : max(at, 0) + count]
        return draft if len(draft) else self._look_up(count)

    def until_end(self, answer: Seq[int], most: int) -> int:
        """Return how many tokens may follow an answer: those that the draft has more, as long as it has any."""
        return min(max(0, len(self._draft) - len(answer)) or most, most)

    def _agreement(self, answer: Seq[int], at: int) -> int:
        """The number of last answer tokens that are in the draft before the place ``at``, side by side."""
        size = min(len(answer), max(at, 0), _COMPARED)
        before = self._draft[at - size : at]
        return int((before == np.array(answer[len(answer) - size :][: len(before)])).sum()) if len(before) else 0

    def _look_up(self, count: int) -> Int32[np.ndarray, " token"]:
        """The tokens that followed the last ones where these were before."""
        tokens = [] if self._ngrams is None else self._ngrams.guess(self._generation_id, count)
        return np.array(tokens, np.int32)


def _after(text: Int32[np.ndarray, " token"], last: Seq[int], near: int) -> int | None:
    """The place in ``text`` nearest to ``near`` that comes after the last tokens of ``last``; None without one."""
    for size in _MATCHED:
        if size > min(len(last), len(text)):
            continue
        same = np.ones(len(text) - size + 1, bool)
        for i, token in enumerate(last[-size:]):
            same &= text[i : len(text) - size + 1 + i] == token
        places = np.flatnonzero(same) + size
        if len(places):
            return int(places[np.argmin(np.abs(places - near))])
    return None


class Drafter:
    """The drafts of the sequences in the slots, and how often they were right.

    What a guess would have been is compared with what was sampled in every launch, also where nothing is verified: so
    drafts that prove wrong cost nothing from then on, and they are verified again once they would have been right.

    Args:
        costs: The time of a step that verifies, in decode steps, by its width; the same on every host.
    """

    def __init__(self, capacity: Capacity, costs: Mapping[int, float]) -> None:
        slots = (capacity.replicas, capacity.slots)
        self._capacity = capacity
        self._costs = {width: costs[width] for width in capacity.verify_widths}
        self._proposers = np.full(slots, None, object)
        self._looked_at, self._right = np.zeros(slots), np.zeros(slots)
        self._run_looked_at, self._run_right = _PRIOR, _PRIOR_RIGHT
        self.drafts = np.full((*slots, capacity.draft_tokens), -1, np.int32)
        """The guesses of the next launch, -1 where there is none."""
        self.looked_at = 0
        """The number of sampled tokens for which there was a guess."""
        self.steps = 0
        """The number of steps in which tokens were sampled, counted once for each sequence."""
        self.right = 0
        """The number of those that were as guessed."""

    def put(self, sequence: Sequence) -> None:
        """Take the drafts of a sequence that was given its slot."""
        at, request = (sequence.replica, sequence.slot), sequence.request
        self._proposers[at] = None
        self._looked_at[at] = self._right[at] = 0.0
        drafts = request.drafts
        if drafts is not None:
            self._proposers[at] = Proposer(drafts, sequence.generation_id, sequence.ngrams)
            keep = min(1.0, _RECENT / max(drafts.compared, 1))
            self._looked_at[at], self._right[at] = keep * drafts.compared, keep * drafts.right

    def batch(self, slots: DecodeSlots, *, waiting: bool, stop_rate: float) -> VerifyBatch | None:
        """Return the batch of a launch that verifies drafts; None where decoding is expected to be as fast.

        Args:
            slots: The sequences and what they may still sample.
        """
        left = slots.all_remaining
        width, expected = self.choose(slots.sequences, left, waiting=waiting)
        if width == 1:
            return None
        steps = num_decode_steps(
            np.ceil(slots.remaining / np.array(expected)).astype(np.int64),
            self.most_steps(width, expected, left),
            waiting=waiting,
            stop_rate=min(0.5, stop_rate * width),
        )
        assert 1 <= steps <= self._capacity.draft_tokens // width
        return VerifyBatch(decode=slots.batch(steps), width=width, drafts=self.drafts.copy())

    def choose(
        self, sequences: np.ndarray, remaining: Int32[np.ndarray, "replica slot"], *, waiting: bool
    ) -> tuple[int, list[float]]:
        """Guess the next tokens of all sequences, and choose how many of them a step should verify.

        While sequences wait, the tokens of all slots per time count. Once none does, the round ends with its last
        sequence: what a step samples of the others is worth nothing if it holds that one up.

        Args:
            sequences: The sequence in each slot ``[replica, slot]``, or None.
            remaining: The number of tokens that each may still sample.

        Returns:
            The width of the steps, 1 for those of decode; and the tokens that a step is expected to sample of each
            sequence, in the order of the slots.
        """
        self.drafts.fill(-1)
        at = np.nonzero(remaining)
        left, lengths = remaining[at].astype(np.int64), np.zeros(len(at[0]), np.int64)
        until_end = left.copy()
        for index, (replica, slot) in enumerate(zip(*at, strict=True)):
            proposer = self._proposers[replica, slot]
            if proposer is not None and left[index] > 1:
                count = min(self._capacity.draft_tokens, int(left[index]))
                answer = sequences[replica, slot].tokens
                guess = proposer.propose(answer, count)
                self.drafts[replica, slot, : len(guess)] = guess
                lengths[index] = len(guess)
                until_end[index] = proposer.until_end(answer, int(left[index]))
        of_run = self._run_right / self._run_looked_at
        share = (self._right[at] + _OF_RUN * of_run) / (self._looked_at[at] + _OF_RUN)
        drafted = lengths > 0
        # As much as a first launch verifies, and of a shorter draft all of it.
        enough = int(np.minimum(lengths, _FIRST).sum())
        known = self.looked_at + math.fsum(self._looked_at[at][drafted].tolist()) >= enough
        best, best_gain, expected = 1, _LEAST_GAIN, np.ones(len(left))
        for width, cost in self._costs.items() if drafted.any() else ():
            if not known and cost - 1.0 > _RISK * int(until_end.max()):
                continue
            tokens = _expected(share, np.minimum(np.minimum(lengths + 1, left), width))
            if waiting:
                gain = math.fsum(tokens.tolist()) / (len(left) * cost)  # exactly rounded, in whatever order
            else:
                steps = np.maximum(until_end / tokens, 1.0)
                gain = float(until_end.max() / (cost * steps.max()))
            if gain > best_gain:
                best, best_gain, expected = width, gain, tokens
        return best, expected.tolist()

    def most_steps(self, width: int, expected: Seq[float], remaining: Int32[np.ndarray, "replica slot"]) -> int:
        """Return the most steps of a launch that verifies: as far as drafts reach, few while little is known of them.

        Args:
            expected: The tokens that a step is expected to sample of each sequence.
            remaining: The number of tokens that each may still sample.
        """
        at = np.nonzero(remaining)
        lengths = (self.drafts[at] >= 0).sum(axis=1)
        drafted = lengths > 0
        reach = np.ceil(np.minimum(lengths + 1, remaining[at])[drafted] / np.array(expected)[drafted])
        known = math.fsum(self._looked_at[at][drafted].tolist()) / int(drafted.sum())
        trusted = int(_FIRST + _GROWTH * known) // width
        return max(1, min(int(reach.max()), trusted, self._capacity.draft_tokens // width))

    def learn(
        self,
        at: tuple[np.ndarray, np.ndarray],
        kept: Int[np.ndarray, " sequence"],
        tokens: Int32[np.ndarray, "replica slot step"],
        step: Int32[np.ndarray, "replica slot step"] | None,
    ) -> None:
        """Compare the guesses of the last `choose` with what was sampled.

        Args:
            kept: The number of tokens that each of them sampled, without those after a stop string.
            step: The step of each token, in a launch that verified drafts; None in one that decoded.
        """
        used = kept > 0
        if step is None:
            self.steps += int(kept.sum())
        else:
            self.steps += int((step[at][used, kept[used] - 1] + 1).sum())
        count = min(tokens.shape[2], self._capacity.draft_tokens)
        sampled, drafts = tokens[at][:, :count], self.drafts[at][:, :count]
        seen = (np.arange(count) < kept[:, None]) & (drafts >= 0)
        looked_at, right = seen.sum(axis=1), (seen & (sampled == drafts)).sum(axis=1)
        of_sequence, right_of_sequence = self._looked_at[at] + looked_at, self._right[at] + right
        keep = np.minimum(1.0, _RECENT / np.maximum(of_sequence, 1.0))
        self._looked_at[at], self._right[at] = of_sequence * keep, right_of_sequence * keep
        for proposer, new, number in zip(self._proposers[at], tokens[at], kept, strict=True):
            if proposer is not None:
                proposer.add(new[:number].tolist())
        self.looked_at += int(looked_at.sum())
        self.right += int(right.sum())
        self._run_looked_at += int(looked_at.sum())
        self._run_right += int(right.sum())


def _expected(share: Float[np.ndarray, " sequence"], most: Int[np.ndarray, " sequence"]) -> Float[np.ndarray, "..."]:
    """The tokens that a step samples: one, and another for as long as each guess before it is right."""
    total, chance = np.zeros(len(share)), np.ones(len(share))
    for position in range(int(most.max())):
        total += np.where(position < most, chance, 0.0)
        chance = chance * share
    return total
