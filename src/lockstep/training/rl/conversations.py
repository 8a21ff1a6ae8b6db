"""The conversations of a rollout: each host talks with the environments of its share, and all hosts hear every word."""

import asyncio
import collections
import contextlib
import copy
import dataclasses
import functools
import json
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.engine import Arrivals
from lockstep.engine.schedule import Scheduler
from lockstep.errors import HostError, PromptError, is_passing
from lockstep.hosts import Hosts, leader_only
from lockstep.json_text import FOREIGN, refused
from lockstep.plugins import own_error_text
from lockstep.printable import get_logger
from lockstep.text import Prompt, cut_at_stop, decode, encode, following_tokens, text_message
from lockstep.training.rl.environment import Environment, Message, Reply
from lockstep.training.rl.questions import AnswerRows
from lockstep.training.rl.rewarding import ERROR_LENGTH, LATE, Rewards
from lockstep.training.rl.segments import Segment
from lockstep.types import Completion, FinishReason, Request, SamplingParams

log = get_logger(__name__)

COMPONENT = "environment"  # the name of its reward among the components
_SHOWN = 10_000  # characters of a message that no model reads
_LOOK_S = 0.01  # seconds between two looks at the clock while nothing but environments is waited for


@dataclasses.dataclass(kw_only=True, eq=False)
class Conversation:
    """One conversation; the same on every host."""

    number: int  # its number in the rollout: the questions' place times the answers of a group, and its own among these
    question: int  # number of the question
    segments: list[Segment] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)  # all that was said, in order
    turns: int = 0  # number of answers
    rewards: dict[int, float] = dataclasses.field(default_factory=dict)  # that of each answer, by its message's place
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # figures of the environment, by name
    error: str | None = None  # what went wrong with the environment
    passing: bool = False  # whether another try may not meet that error
    ended: bool = False
    last: bool = False  # whether the last answer leaves no room for another turn

    @property
    def said(self) -> str:
        """All that the model said, a line per turn."""
        return "\n".join(str(message["content"]) for message in self.messages if message["role"] == "assistant")

    @property
    def reward(self) -> float:
        """The reward of all answers together."""
        return sum(self.rewards.values())

    @property
    def turns_with_rewards(self) -> list[Message]:
        """All messages, each answer with the ``reward`` that followed it, where the environment has replied."""
        return [
            {**message, "reward": self.rewards[place]} if place in self.rewards else message
            for place, message in enumerate(self.messages)
        ]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum(len(segment.tokens) for segment in self.segments)

    def completion(self, place: int, generation_id: int) -> Completion:
        """All that the model said as one answer."""
        answers = [segment.completion for segment in self.segments if segment.completion is not None]
        return Completion(
            prompt_id=place,
            generation_id=generation_id,
            tokens=tuple(token for answer in answers for token in answer.tokens),
            logprobs=tuple(value for answer in answers for value in answer.logprobs),
            sampled_logprobs=tuple(value for answer in answers for value in answer.sampled_logprobs),
            finish_reason=answers[-1].finish_reason if answers else FinishReason.CANCELLED,
        )


class _Failure(str):
    """The text of what went wrong with an environment."""

    passing = False


class _Outage(_Failure):
    """The text of an error that another try may not meet."""

    passing = True


class EnvironmentThread:
    """The environment of one conversation, in a thread with an event loop. One that hangs is left behind.

    Args:
        environment: The environment of the run, which the thread copies.
        replies: The queue of what the copy returns and raises, with the conversation's number.
    """

    def __init__(self, environment: Environment, number: int, replies: "queue.SimpleQueue[tuple[int, Any]]") -> None:
        self._environment, self._number, self._said = environment, number, replies
        self._calls: queue.SimpleQueue[Callable[[], Coroutine[Any, Any, Any]] | None] = queue.SimpleQueue()
        self.deadline: float | None = None
        """When it is late, by ``time.monotonic()``; None while it has nothing to do."""
        threading.Thread(target=self._work, name=f"lockstep-environment-{number}", daemon=True).start()

    def reset(self, question: Prompt) -> None:
        """Have the environment begin; returns at once."""
        self._call(functools.partial(self._begun, question))

    def step(self, message: Message) -> None:
        """Have the environment reply to an answer; returns at once."""
        self._call(functools.partial(self._environment.step, dict(message)))

    def end(self, reply: Reply) -> None:
        """Have the environment end a conversation after a reply that is the last; returns at once."""
        self._call(functools.partial(self._ended, reply))

    async def _begun(self, question: Prompt) -> Sequence[Message]:
        try:
            self._environment = copy.deepcopy(self._environment)
        except Exception as error:
            raise TypeError(
                f"{type(self._environment).__name__} cannot be copied for each conversation ({error}). Make what "
                "cannot, such as clients and locks, in reset"
            ) from error
        messages: Any = await self._environment.reset(copy.deepcopy(question))
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise TypeError(f"reset returned {messages!r:.200}, and must return a list of messages")
        return tuple(messages)

    async def _ended(self, reply: Reply) -> Reply:
        last: Any = await self._environment.end()
        if not isinstance(last, Reply):
            raise TypeError(f"end returned {last!r:.200}, and must return a lockstep.training.Reply")
        metrics = {**reply.metrics, **last.metrics}
        return dataclasses.replace(reply, reward=reply.reward + last.reward, metrics=metrics, done=True)

    def close(self) -> None:
        """End the thread once it has nothing to do."""
        self._calls.put(None)

    def _call(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.deadline = time.monotonic() + self._environment.timeout_s
        self._calls.put(call)

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                try:
                    with leader_only():
                        result = runner.run(asyncio.wait_for(call(), self._environment.timeout_s))
                except BaseException as error:  # an environment is the user's own code
                    late = isinstance(error, TimeoutError) and time.monotonic() >= (self.deadline or 0.0)
                    failure = _Outage if late or is_passing(error) else _Failure
                    text = own_error_text(error, ERROR_LENGTH)
                    if isinstance(error, RuntimeError) and "event loop" in text.lower():
                        text += ". Each conversation has an event loop of its own: make clients in reset"
                    result = failure(LATE if late else text)
                self._said.put((self._number, result))
            with contextlib.suppress(BaseException), leader_only():
                runner.run(asyncio.wait_for(self._environment.close(), self._environment.timeout_s))


class Conversations(Arrivals):
    """Requests that follow from answers: the turns of all conversations of a rollout.

    Args:
        drawn: The number of each group's question.
        group: The number of conversations about a question.
        params: How each answer is sampled.
    """

    def __init__(
        self,
        environment: Environment,
        rows: AnswerRows,
        hosts: Hosts,
        *,
        drawn: Sequence[int],
        group: int,
        params: SamplingParams,
    ) -> None:
        self._environment, self._questions, self._tokenizer = environment, rows.questions, rows.tokenizer
        self._hosts, self._group, self._params, self._stop = hosts, group, params, rows.stop
        self.conversations = [
            Conversation(number=number, question=question)
            for number, question in enumerate(question for question in drawn for _ in range(group))
        ]
        """All conversations, group by group."""
        self._requests: collections.deque[Request] = collections.deque()
        self._forgotten: list[int] = []
        self._said: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._threads: dict[int, EnvironmentThread] = {}  # those of this host's share
        for conversation in self.conversations[hosts.index :: hosts.count]:
            thread = EnvironmentThread(environment, conversation.number, self._said)
            self._threads[conversation.number] = thread
            thread.reset(self._questions.prompts[conversation.question])

    def __iter__(self) -> Iterator[Request | None]:
        """Yield the next turns as they come; None where none is there and some will come."""
        while self._requests or not all(conversation.ended for conversation in self.conversations):
            yield self._requests.popleft() if self._requests else None

    def take(self, wait_s: float) -> str:
        """Return what the environments of this host have said since the last call.

        Args:
            wait_s: The seconds to wait at most where they have said nothing.
        """
        words: list[dict[str, Any]] = []
        end = time.monotonic() + wait_s
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    words += self._words(*self._said.get_nowait())
            now = time.monotonic()
            for number, thread in self._threads.items():
                if thread.deadline is not None and now > thread.deadline:
                    words += self._words(number, _Outage(LATE))
            if words or now >= end:
                return json.dumps(words) if words else ""
            time.sleep(min(_LOOK_S, end - now))

    def hear(self, texts: Sequence[str]) -> None:
        """Take what the environments of all hosts have said, the same on every host."""
        with refused("what the processes have shared of their conversations", FOREIGN, HostError):
            for text in filter(None, texts):
                for words in json.loads(text):
                    self._hear(self.conversations[words["number"]], words)

    def between_launches(self, scheduler: Scheduler) -> None:
        """Give up the K/V of conversations that have ended."""
        for number in self._forgotten:
            scheduler.forget(number)
        self._forgotten = []

    def answered(self, completions: Sequence[Completion]) -> None:
        """Take answers, the same on every host; the environments of this host's share begin to think."""
        for completion in completions:
            if completion.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                continue  # the job is asked to end
            conversation = self.conversations[completion.prompt_id % len(self.conversations)]
            before = [token for segment in conversation.segments for token in segment.tokens]
            text = cut_at_stop(decode(self._tokenizer, completion.tokens, before), self._stop)
            conversation.segments.append(Segment(tokens=completion.tokens, completion=completion))
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.turns += 1
            cut = completion.finish_reason != FinishReason.STOP
            conversation.last = cut or conversation.turns >= self._environment.max_turns
            if conversation.number in self._threads:
                self._threads[conversation.number].step(conversation.messages[-1])

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.close()

    def completions(self) -> list[Completion]:
        """Return each conversation's answers as one, in the order of the conversations."""
        return [
            conversation.completion(*divmod(conversation.number, self._group)) for conversation in self.conversations
        ]

    def rewards(self) -> Rewards:
        """Return the rewards of all conversations; those whose environment failed are dropped with their group."""
        errors = [conversation.error for conversation in self.conversations]
        total = np.array([conversation.reward for conversation in self.conversations], np.float64)
        failed = np.array([error is not None for error in errors])
        total[failed] = 0.0
        late = errors.count(LATE)
        return Rewards(
            total=total,
            components={COMPONENT: total},
            failed={COMPONENT: int(failed.sum()) - late},
            late={COMPONENT: late},
            judged=total,
            dropped=failed,
        )

    def _words(self, number: int, result: Any) -> list[dict[str, Any]]:
        """The words of an environment as all hosts hear them; nothing where it is too late for that."""
        thread, conversation = self._threads[number], self.conversations[number]
        if thread.deadline is None:
            return []
        thread.deadline = None
        try:
            if isinstance(result, _Failure):
                return [{"number": number, "error": str(result), "passing": result.passing}]
            reply = result if conversation.segments else Reply(messages=result)
            if not isinstance(reply, Reply):
                raise TypeError(f"step returned {reply!r:.200}, and must return a lockstep.training.Reply")
            messages = [dict(text_message(message)) for message in reply.messages]
            if reply.done:
                messages = list(map(_shortened, messages))
            tokens = [] if reply.done or conversation.last else self._tokens(conversation, messages)
            if conversation.segments and not reply.done and (conversation.last or self._room(conversation, tokens) < 1):
                thread.end(reply)
                return []
            words = {
                "number": number,
                "messages": messages,
                "tokens": tokens,
                "reward": float(reply.reward),
                "metrics": {str(name): float(value) for name, value in reply.metrics.items()},
                "done": bool(reply.done),
            }
            try:
                json.dumps(words)
            except (TypeError, ValueError) as error:
                raise TypeError(f"a message has what JSON has not ({error}): {messages!r:.200}") from error
            return [words]
        except Exception as error:
            return [{"number": number, "error": own_error_text(error, ERROR_LENGTH)}]

    def _tokens(self, conversation: Conversation, messages: Sequence[Message]) -> Sequence[int]:
        """The tokens that the model reads before its next answer."""
        prompt = self._questions.prompts[conversation.question]
        if not conversation.segments:
            if not messages or tuple(messages) == prompt.messages:
                return self._questions.tokens[conversation.question]
            return encode(self._tokenizer, [Prompt(id=conversation.number, messages=tuple(messages))])[0]
        if not messages:
            raise PromptError("step returned no message and done is false: the model would have nothing to answer to.")
        answer = conversation.segments[-1].tokens
        return following_tokens(self._tokenizer, conversation.messages[:-1], answer, messages)

    def _room(self, conversation: Conversation, tokens: Sequence[int]) -> int:
        """The tokens that an answer to some more may have."""
        return self._questions.row_length - conversation.length - len(tokens)

    def _hear(self, conversation: Conversation, words: Mapping[str, Any]) -> None:
        error = words.get("error")
        if error is None:
            tokens = tuple(words["tokens"])
            room = min(self._room(conversation, tokens), self._params.max_new_tokens)
            if conversation.turns:
                conversation.rewards[len(conversation.messages) - 1] = words["reward"]
            conversation.messages += words["messages"]
            conversation.metrics |= words["metrics"]
            if room < 1 and not words["done"]:
                most = self._questions.row_length
                error = f"the first messages have {len(tokens)} tokens; data.max_seq_len is {most}"
            conversation.ended = words["done"]
        conversation.error, conversation.passing = error, words.get("passing", False)
        conversation.ended |= error is not None
        if conversation.ended:
            self._forgotten.append(conversation.number)
            if conversation.number in self._threads:
                self._threads[conversation.number].close()
            return
        conversation.segments.append(Segment(tokens=tokens))
        prompt_tokens = tuple(token for segment in conversation.segments for token in segment.tokens)
        params = dataclasses.replace(
            self._params, max_new_tokens=room, min_tokens=min(self._params.min_tokens, room), n_generations=1
        )
        # The number of the turn is in the draws too: they depend on the number of the request.
        number = conversation.turns * len(self.conversations) + conversation.number
        self._requests.append(
            Request(prompt_id=number, prompt_tokens=prompt_tokens, params=params, conversation=conversation.number)
        )


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    """A message that no model reads, as rows and other hosts have it: the result of a tool may be a whole file."""
    content = message["content"] or ""
    if len(content) <= _SHOWN:
        return message
    return {**message, "content": f"{content[:_SHOWN]}… ({len(content):,} characters)"}


def longest_turns(params: SamplingParams, row_length: int, count: int) -> list[Request]:
    """Return requests that need as much as any turns of conversations, at the end of their rows.

    Args:
        params: How each answer is sampled.
        count: The number of conversations.
    """
    params = dataclasses.replace(params, n_generations=1)
    prompt = (0,) * (row_length - params.max_new_tokens)
    return [Request(prompt_id=number, prompt_tokens=prompt, params=params) for number in range(count)]
