"""A round of sampling on all hosts: barrier, prompts from the leader, generation, barrier (docs/protocol.md)."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.callback.config import InferenceEvalConfig
from lockstep.callback.evaluation import limits_of
from lockstep.engine import EarlierAnswers, Generation, PhaseClock, Session
from lockstep.engine.sampling.filters import check_filters_of
from lockstep.errors import AlarmError
from lockstep.hosts import Hosts, environment
from lockstep.json_text import from_peer
from lockstep.printable import printable
from lockstep.text import ModelLimits, Prompt, StopFinder, encode, stop_ids, warn_of_texts
from lockstep.types import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPrompts:
    """The prompts of a round.

    Args:
        prompts: The prompts in the order of their numbers; empty where they came by broadcast.
        largest: As many requests as in any round, and as long: programs are made for these, so that another round's
            prompts compile nothing. None where each round has the same requests.
    """

    prompts: list[Prompt] = dataclasses.field(default_factory=list)
    requests: list[Request]
    largest: list[Request] | None = None

    @property
    def compile_requests(self) -> list[Request]:
        """The requests that programs are made for."""
        return self.requests if self.largest is None else self.largest


def read_round_prompts(
    config: InferenceEvalConfig,
    tokenizer: "PreTrainedTokenizerBase",
    step: int = 0,
    limits: ModelLimits | None = None,
) -> RoundPrompts:
    """Read and encode the prompts of the round after ``step``; host-only.

    Args:
        limits: Those of the model; None: they are not checked.

    Raises:
        PromptError: A prompt or file cannot be used.
        ConfigError: A stop string can never be found, or there are fewer prompts than a round has.
    """
    StopFinder(tokenizer).check(config.stop)
    prompts = list(config.stream_prompts())
    warn_of_texts(tokenizer, prompts, config.prompt_fields)
    config.check_prompts_per_round(len(prompts))
    params = config.sampling_params(stop_ids(tokenizer))
    encoded = encode(
        tokenizer, prompts, max_seq_len=config.max_seq_len, max_new_tokens=config.max_new_tokens, limits=limits
    )
    requests = [
        Request(prompt_id=prompt.id, prompt_tokens=tokens, params=params)
        for prompt, tokens in zip(prompts, encoded, strict=True)
    ]
    if config.prompts_per_round is None:
        return RoundPrompts(prompts=prompts, requests=requests)
    drawn = drawn_prompts(config, len(prompts), step)
    return RoundPrompts(
        prompts=[prompts[number] for number in drawn],
        requests=[requests[number] for number in drawn],
        largest=largest_of(requests, config.prompts_per_round),
    )


def with_drafts(round_prompts: RoundPrompts, earlier: EarlierAnswers) -> RoundPrompts:
    """Return the prompts of a round with the last answers to each as drafts."""

    def each(requests: Sequence[Request]) -> list[Request]:
        return [dataclasses.replace(request, drafts=earlier.drafts(prompt_key(request))) for request in requests]

    return dataclasses.replace(
        round_prompts,
        requests=each(round_prompts.requests),
        largest=None if round_prompts.largest is None else each(round_prompts.largest),
    )


def keep_answers(earlier: EarlierAnswers, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Keep the answers of a round."""
    answers: dict[int, list[tuple[int, ...]]] = {}
    for completion in completions:
        answers.setdefault(completion.prompt_id, []).append(completion.tokens)
    for request in requests:
        earlier.keep(prompt_key(request), answers.get(request.prompt_id, []))


def prompt_key(request: Request) -> tuple[int, tuple[int, ...]]:
    """The identity of a prompt: its number, on which the draws depend, and its tokens."""
    return request.prompt_id, request.prompt_tokens


def drawn_prompts(config: InferenceEvalConfig, count: int, step: int) -> list[int]:
    """The numbers of the prompts of the round after ``step``, in order: a function of seed and step alone.

    All prompts are shuffled and dealt, round by round; when fewer than a round's are left, they are shuffled anew. So
    no prompt comes twice before nearly all others had their turn.
    """
    per_round = config.prompts_per_round
    assert per_round is not None
    rounds_before = max(0, -(-step // config.eval_every) - (not config.at_start))
    deal, part = divmod(rounds_before, count // per_round)
    order = np.random.default_rng([config.seed, deal]).permutation(count)
    return sorted(order[part * per_round : (part + 1) * per_round].tolist())


def largest_of(requests: Sequence[Request], count: int) -> list[Request]:
    """The ``count`` requests with the longest prompts, the first of equals."""
    return sorted(requests, key=lambda request: -len(request.prompt_tokens))[:count]


def to_bytes(round_prompts: RoundPrompts) -> bytes:
    """A round's prompts as they are broadcast: ids and parameters, no text."""
    lists = (round_prompts.requests, round_prompts.largest)
    return json.dumps(
        [requests and [dataclasses.asdict(request) for request in requests] for requests in lists]
    ).encode()


def from_bytes(data: bytes, filters: Collection[str] = ()) -> RoundPrompts:
    """The inverse of `to_bytes`, without the prompts' text.

    Args:
        filters: The filters that this host's own configuration names.

    Raises:
        HostError: It is something else, or would have a module imported that the configuration does not name.
    """
    place = "the leader's round of prompts"
    requests, largest = from_peer(data, tuple[list[Request], list[Request] | None], place)
    check_filters_of(place, [request.params for request in (*requests, *(largest or ()))], filters)
    return RoundPrompts(requests=requests, largest=largest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundResult:
    """Prompts and completions of a round."""

    prompts: list[Prompt] | None  # the prompts as the leader read them; None elsewhere
    requests: list[Request]  # the same on every host, drafts included
    generation: Generation  # the completions; its `seconds` have the phases of the round too


def run_round(
    hosts: Hosts,
    session: Session,
    model: Any,
    *,
    facts: Mapping[str, str],
    read: Callable[[ModelLimits | None], RoundPrompts],
    filters: Collection[str] = (),
    max_seconds: float | None = None,
    stop_reason: str | None = None,
) -> RoundResult | None:
    """Barrier, broadcast, generation, barrier: every host makes the same steps or none.

    Args:
        hosts: Inside a scope of this round's own; its ``timeout_s`` bounds every wait.
        facts: What must be the same on every host before anything else happens (step, configuration, tokenizer).
        read: Reads the prompts, within the limits of the model where that can be read; called on the leader alone.
        filters: The filters that the configuration names; prompts with others are refused.
        max_seconds: The seconds that generation may last; None for no limit.
        stop_reason: Why this host wants the run to end; None where it does not.

    Returns:
        None where the job is asked to end: the round was aborted between the same two launches on every host.

    Raises:
        AlarmError: A host wants the run to end; raised on every host, before anything is launched.
        PeerError, DisagreementError, LaunchMismatchError, HostTimeoutError: See `Session.generate`.
    """
    clock = PhaseClock()
    prompts: list[Prompt] | None = None

    def read_on_leader() -> bytes:
        nonlocal prompts, model
        limits = None
        with contextlib.suppress(Exception):  # every host says it when it measures memory
            model = session.read(hosts, model)
            limits = limits_of(model)
        round_prompts = read(limits)
        prompts = round_prompts.prompts
        return to_bytes(round_prompts)

    with hosts.run_on_all("begin", "waiting for all hosts to begin") as begin:
        begin.agree({**facts, **environment(), "debug": str(hosts.debug)})
        begin.share((hosts.preemption.requested(), stop_reason or ""))
    clock.lap("barrier")
    if any(ended for ended, _ in begin.shared):
        _end(hosts)
        return None
    if reason := begin.shared[0][1]:  # the leader's, which alone has alarms
        _end(hosts)
        raise AlarmError(f"{printable(reason)} (alarms.on_alarm)")

    hosts.phase("read prompts")
    round_prompts = from_bytes(hosts.broadcast_from_leader("prompts", read_on_leader), filters)
    clock.lap("prompts")

    generation = session.generate(
        hosts, model, round_prompts.requests, largest=round_prompts.compile_requests, max_seconds=max_seconds
    )
    clock.lap("generate")
    _end(hosts)
    clock.lap("barrier")
    if generation.ended:
        return None
    generation = dataclasses.replace(generation, seconds={**clock.seconds, **generation.seconds})
    return RoundResult(prompts=prompts, requests=round_prompts.requests, generation=generation)


def _end(hosts: Hosts) -> None:
    """No host goes on to train while another still samples."""
    hosts.phase("training")
    hosts.barrier("end")
