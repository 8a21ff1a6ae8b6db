"""Alarms: a state of answers that has become more frequent than chance, and a healthy run's own wandering, allow.

A share is compared with that of the run's earlier rounds. The same prompts are asked in every round, with the same
draws, and a model that has not changed gives the same answers: rounds are no independent samples. So a trial is an
answer that was free of a state when its prompt was asked last, and a success is that it has the state now: a state that
only stays is no further evidence. As far as the answers to one prompt go together, they count as one
(`significance.design_effect`).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int

from lockstep.health.alarm import ALL, Alarm, PromptStates
from lockstep.health.answer import Share
from lockstep.health.significance import (
    binomial_tail,
    design_effect,
    deviations,
    fisher_tail,
    least_tail,
    tarone_factor,
)
from lockstep.json_text import typed

FALSE_ALARMS: Final = 1e-3  # false alarms per round, over all states and groups together
ODDS: Final = 2.0
"""The factor by which the odds of a state may grow in a healthy run: a change has to be larger, beyond chance."""
WINDOWS: Final = (1, 2, 4, 8)
"""Numbers of last rounds that are compared with those before them: a state may come at once or by and by."""
REFERENCES: Final = (8, 32)
"""Numbers of rounds that they are compared with: few, where the run was bad at its beginning."""
KEPT: Final = max(WINDOWS) + max(REFERENCES) + 1
"""Rounds that the alarms of the next one depend on."""
WARM_UP: Final = 8
"""Rounds without an alarm at the beginning of a run whose model learns from nothing."""
COMMON: Final = 1 / 3
"""The share of answers up to which a state is none to tell where it was there from the first round on."""
TELLING: Final = 0.01  # the chance that a group is named which has a state no more often than the others
_CHANCE: Final = 3.0  # standard deviations below which a rise is chance, whatever the number of tests
_SHOWN: Final = 10  # prompts that an alarm names


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Round:
    step: int
    prompts: Sequence[PromptStates]
    groups: Mapping[str, int]  # the index of each group in `trials`
    trials: Float[np.ndarray, "kind group state 2"]
    """Successes and trials: of answers to prompts that were asked before, to those that are new, and of all, whatever
    they were before."""
    clusters: Float[np.ndarray, "state 4"]
    """Arguments of `design_effect` with prompts as clusters: sums over the prompts."""


class Alarms:
    """Says after each round which states have become more frequent.

    Args:
        states: All states.
        false_alarms: The expected number of false alarms per round, over all states and groups together, while the
            odds of each state grow by no more than `ODDS`.
        warm_up: The number of first rounds that raise no alarm: a model that learns from nothing says the same to
            everybody for a while. With 0 it was trained before, and a state that more than `COMMON` of the answers have
            in two rounds is an alarm from the first one on.
        usual: States that are none then, such as answers that are cut.

    Example:
        >>> alarms = Alarms(["loop", "empty"])
        >>> def round_of(looping):
        ...     return [PromptStates(prompt=str(i), answers=[{"loop"} if i < looping else {}]) for i in range(32)]
        >>> [alarms.add(step, round_of(1)) for step in range(0, 500, 50)][-1]
        []
        >>> print(*alarms.add(500, round_of(24)))
        step 500: loop in 24 of 32 answers (75 %), before in 8 of 256 answers (3.1 %); since step 500
        >>> alarms.add(550, round_of(24))
        []
    """

    def __init__(
        self,
        states: Iterable[str],
        *,
        false_alarms: float = FALSE_ALARMS,
        warm_up: int = WARM_UP,
        usual: Iterable[str] = (),
    ) -> None:
        self._states = tuple(states)
        self._false_alarms, self._warm_up, self._usual = false_alarms, warm_up, frozenset(usual)
        self._count = 0  # rounds so far
        self._rounds: collections.deque[_Round] = collections.deque(maxlen=KEPT)
        self.lasting: dict[str, Alarm] = {}
        """The states that an alarm was raised for and that are still there, each with its alarm."""
        self._affected: set[tuple[int, str]] = set()
        """Steps with states that lasted in their rounds, which say nothing of how frequent these usually are."""

    def add(self, step: int, prompts: Sequence[PromptStates]) -> list[Alarm]:
        """Take in a round; return the alarms that it raises, one per state at most."""
        if not prompts:
            return []
        self._append(step, prompts)
        self._count += 1
        self._end_lasting()
        if self._count <= self._warm_up:
            return []
        risen = self._risen_states()
        common = [state for state in self._common_states() if state not in risen]
        alarms = [self._alarm(state, state in risen) for state in (*risen, *common)]
        self._last(step, [*self.lasting.values(), *alarms])
        return alarms

    def record(self) -> dict[str, Any]:
        """The last round as JSON values, for `resume`."""
        prompts = self._rounds[-1].prompts
        answers = [answer for prompt in prompts for answer in prompt.answers]
        states = {state: [place for place, answer in enumerate(answers) if state in answer] for state in self._states}
        groups = {group: [place for place, x in enumerate(prompts) if group in x.groups] for group in self._groups}
        return {
            "count": self._count,
            "prompts": [prompt.prompt for prompt in prompts],
            "answers": [len(prompt.answers) for prompt in prompts],
            "states": {state: places for state, places in states.items() if places},
            "groups": groups,
            "lasting": [dataclasses.asdict(alarm) for alarm in self.lasting.values()],
        }

    def resume(self, step: int, record: Mapping[str, Any]) -> None:
        """Take in a round from what `record` returned after it in an earlier process; it raises no alarm.

        Raises:
            Exception: It is no such record.
        """
        names, sizes = typed(list[str], record["prompts"]), typed(list[int], record["answers"])
        answers: list[set[str]] = [set() for _ in range(sum(sizes))]
        groups: list[set[str]] = [set() for _ in names]
        for members, places in ((answers, record["states"]), (groups, record["groups"])):
            for name, own in typed(dict[str, list[int]], places).items():
                for place in own:
                    members[place] |= {name}
        ends = itertools.accumulate(sizes)
        prompts = [
            PromptStates(prompt=name, answers=answers[end - size : end], groups=sorted(own))
            for name, size, end, own in zip(names, sizes, ends, groups, strict=True)
        ]
        self._append(step, prompts)
        self._count = typed(int, record["count"])
        self._last(step, [Alarm.from_dict(values) for values in record["lasting"]])

    def _append(self, step: int, prompts: Sequence[PromptStates]) -> None:
        """Take in a round; those of the same step or of later ones are forgotten: the run went back."""
        while self._rounds and self._rounds[-1].step >= step:
            self._rounds.pop()
            self._count -= 1
        self.lasting = {state: alarm for state, alarm in self.lasting.items() if alarm.step < step}
        last = {prompt.prompt: prompt.answers for earlier in self._rounds for prompt in earlier.prompts}
        sizes = collections.Counter(group for prompt in prompts for group in prompt.groups)
        # A group of all prompts tells nothing that all prompts do not.
        groups = {ALL: 0} | {group: 1 + i for i, group in enumerate(x for x in sizes if sizes[x] < len(prompts))}
        total = sum(len(prompt.answers) for prompt in prompts)
        members, asked = np.zeros((len(groups), total)), np.zeros(total, bool)
        now, before = np.zeros((2, total, len(self._states)))
        row = 0
        for prompt in prompts:
            earlier_answers = last.get(prompt.prompt, ())
            own = [0, *(groups[group] for group in prompt.groups if group in groups)]
            for place, answer in enumerate(prompt.answers):
                members[own, row] = 1
                now[row] = [state in answer for state in self._states]
                if place < len(earlier_answers):
                    asked[row] = True
                    before[row] = [state in earlier_answers[place] for state in self._states]
                row += 1
        values = np.stack([now * (1 - before), 1 - before], axis=-1)
        kinds = [np.einsum("gp,psv->gsv", members * kind, values) for kind in (asked, ~asked)]
        kinds.append(np.einsum("gp,psv->gsv", members, np.stack([now, np.ones_like(now)], axis=-1)))
        self._rounds.append(
            _Round(
                step=step,
                prompts=prompts,
                groups=groups,
                trials=np.stack(kinds),
                clusters=_clusters(now, np.array([len(prompt.answers) for prompt in prompts])),
            )
        )

    @property
    def _groups(self) -> list[str]:
        """The groups that a part of the last round's prompts belong to."""
        return [group for group in self._rounds[-1].groups if group != ALL]

    def _last(self, step: int, alarms: Iterable[Alarm]) -> None:
        """Have the states of alarms last."""
        self.lasting = {alarm.state: alarm for alarm in alarms}
        self._affected |= {
            (earlier.step, alarm.state)
            for alarm in self.lasting.values()
            for earlier in self._rounds
            if earlier.step >= alarm.began
        }
        self._affected = {place for place in self._affected if self._rounds[0].step <= place[0] <= step}

    def _end_lasting(self) -> None:
        """Forget the alarms of states that were back at less than half of their rise in two rounds after another."""
        for state, alarm in list(self.lasting.items()):
            before, now = 0.0 if alarm.before is None else alarm.before.value, alarm.inside or alarm.now
            rounds = [[x for x in own.prompts if alarm.group in (ALL, *x.groups)] for own in list(self._rounds)[-2:]]
            if all(_share(state, prompts).value < (before + now.value) / 2 for prompts in rounds if prompts):
                del self.lasting[state]

    def _risen_states(self) -> list[str]:
        """The states that are more frequent than in earlier rounds, beyond chance."""
        tests = list(self._tests())
        chances: dict[str, float] = {}
        for state, now, before in tests:
            rows = np.flatnonzero((before[:, 1] > 0) & (deviations(now, before) >= _CHANCE))
            tails = [fisher_tail(now[row], before[row], ODDS) for row in rows]
            chances[state] = min([*tails, chances.get(state, 1.0)])
        if min(chances.values(), default=1.0) > self._false_alarms:
            return []
        least = np.concatenate([least_tail(now, before) for _, now, before in tests])
        limit = self._false_alarms / tarone_factor(self._false_alarms, least)
        return [state for state, chance in chances.items() if chance <= limit]

    def _tests(self) -> Iterator[tuple[str, Float[np.ndarray, "test 2"], Float[np.ndarray, "test 2"]]]:
        """The samples of each state and window now, and those before: for each kind of prompt, group and reference."""
        groups, rounds = self._rounds[-1].groups, list(self._rounds)
        trials = np.zeros((len(rounds), 3, len(groups), len(self._states), 2))
        for place, earlier in enumerate(rounds):
            shared = [group for group in groups if group in earlier.groups]
            rows, columns = [groups[group] for group in shared], [earlier.groups[group] for group in shared]
            trials[place][:, rows] = earlier.trials[:, columns]
        for index, state in enumerate(self._states):
            if state in self.lasting or not trials[..., index, 0].any():
                continue
            free = self._free(state)
            # A rise by and by, round after round, is seen from the first of them alone: two samples, not one by one.
            if len(free) > 1:
                first, last = (self._sample(trials, index, [place])[2] for place in (free[0], free[-1]))
                yield state, last, first
            for window in (window for window in WINDOWS if window < len(free)):
                now, before = free[-window:], free[:-window]
                samples = self._sample(trials, index, now)[:2]
                for size in {min(size, len(before)) for size in REFERENCES}:
                    asked, new, _ = self._sample(trials, index, before[-size:])
                    # A prompt that is new has a state at least as often as one comes into it that was free of it.
                    yield state, samples.reshape(-1, 2), np.stack([asked + new, new]).reshape(-1, 2)

    def _sample(
        self, trials: Float[np.ndarray, "round kind group state 2"], state: int, places: Sequence[int]
    ) -> Float[np.ndarray, "kind group 2"]:
        """Successes and trials of some rounds, in numbers of answers that are drawn by themselves."""
        clusters = np.sum([self._rounds[place].clusters[state] for place in places], axis=0)
        return trials[places, :, :, state].sum(0) / design_effect(*clusters)

    def _free(self, state: str) -> list[int]:
        """The rounds in which a state did not last."""
        return [place for place, x in enumerate(self._rounds) if (x.step, state) not in self._affected]

    def _common_states(self) -> Iterator[str]:
        """States that many answers of a trained model have in two rounds after another, and that do not fade."""
        rounds = [earlier for earlier in self._rounds if earlier.step > 0][-2:]
        if self._warm_up or len(rounds) < 2:
            return
        for state in self._states:
            if state in self._usual or state in self.lasting:
                continue
            # A prompt of both rounds counts with its last answers; those of GRPO's rollouts are others in each round.
            newest = {prompt.prompt: prompt.share(state) for x in rounds for prompt in x.prompts}
            chance = binomial_tail(math.fsum(newest.values()), len(newest), COMMON)
            shares = [_share(state, x.prompts).value for x in rounds]
            fades = shares[1] < 0.9 * shares[0]
            if chance <= self._false_alarms / len(self._states) and min(shares) > COMMON and not fades:
                yield state

    def _alarm(self, state: str, risen: bool) -> Alarm:
        """The alarm of a state of the last round.

        Args:
            risen: Whether it was less frequent in earlier rounds, beyond chance.
        """
        rounds, free = list(self._rounds), self._free(state)
        shares = [_share(state, x.prompts).value for x in rounds]
        first = len(rounds) - 1
        middle = (shares[first] + (min(shares[place] for place in free) if risen else 0.0)) / 2
        while first - 1 in free and shares[first - 1] > middle:
            first -= 1
        earlier = [place for place in free if place < first][-min(REFERENCES) :]
        before = [prompt for place in earlier for prompt in rounds[place].prompts]
        since = [prompt for x in rounds[first:] for prompt in x.prompts]
        group = self._telling_group(state, since)
        affected = [prompt for prompt in (*rounds[-1].prompts, *since) if prompt.count(state)]
        affected.sort(key=lambda prompt: (group not in (ALL, *prompt.groups), -prompt.share(state)))
        return Alarm(
            step=rounds[-1].step,
            state=state,
            began=rounds[first].step,
            before=_share(state, before) if before else None,
            now=_share(state, since),
            group=group,
            inside=_share(state, [x for x in since if group in x.groups]) if group else None,
            outside=_share(state, [x for x in since if group not in x.groups]) if group else None,
            prompts=tuple(dict.fromkeys(prompt.prompt for prompt in affected))[:_SHOWN],
        )

    def _telling_group(self, state: str, prompts: Sequence[PromptStates]) -> str:
        """The group whose prompts have a state more often than the others, beyond chance; `ALL` where there is none."""
        newest = {prompt.prompt: prompt for prompt in prompts}.values()
        chances = []
        for group in self._groups:
            parts: tuple[list[float], list[float]] = ([], [])
            for prompt in newest:
                parts[group not in prompt.groups].append(prompt.share(state))
            if all(parts):
                inside, outside = (np.array([math.fsum(part), len(part)]) for part in parts)
                chances.append((fisher_tail(inside, outside), group))
        chance, group = min(chances, default=(1.0, ALL))
        return group if chance * len(chances) <= TELLING else ALL


def _clusters(
    now: Float[np.ndarray, "answer state"], sizes: Int[np.ndarray, " prompt"]
) -> Float[np.ndarray, "state 4"]:
    counts = np.add.reduceat(now, np.cumsum(sizes) - sizes)
    differing = (counts * (sizes[:, None] - counts)).sum(0)
    same = np.ones_like(differing)
    return np.stack([differing, counts.sum(0), (sizes * (sizes - 1)).sum() * same, sizes.sum() * same], axis=-1)


def _share(state: str, prompts: Collection[PromptStates]) -> Share:
    return Share(count=sum(x.count(state) for x in prompts), total=sum(len(x.answers) for x in prompts))
