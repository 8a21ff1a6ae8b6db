"""Conversations without a model: what environments of users return, and what all hosts hear of it."""

import dataclasses
import json
import threading
from typing import Any

import pytest

from lockstep.hosts import Hosts, MemoryClient
from lockstep.training import Environment, Reply, ToolEnvironment
from lockstep.training.rl.conversations import Conversations
from lockstep.training.rl.questions import AnswerRows
from lockstep.types import Completion, FinishReason, SamplingParams
from tests import rollouts as runs
from tests import tiny
from tests.environments import multiply

USER = {"role": "user", "content": "More."}


@dataclasses.dataclass(kw_only=True)
class Returns(Environment):
    """Returns what it is told to."""

    first: Any = ()
    reply: Any = None

    async def reset(self, question: Any) -> Any:
        return self.first

    async def step(self, message: Any) -> Any:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@dataclasses.dataclass(kw_only=True)
class Locked(Returns):
    """Cannot be copied."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lock = threading.Lock()


@dataclasses.dataclass(kw_only=True)
class Products(ToolEnvironment):
    """Has a tool, and rewards any answer."""

    def tools(self) -> Any:
        return [multiply]

    async def score(self, answer: str) -> float:
        return 1.0


def begun(environment):
    """One conversation, and what its environment has said first."""
    rows = AnswerRows(
        questions=dataclasses.replace(runs.questions(), row_length=500), tokenizer=tiny.tokenizer(), stop=()
    )
    conversations = Conversations(
        environment, rows, Hosts(MemoryClient.hub(1)[0]), drawn=[0], group=1, params=SamplingParams(max_new_tokens=60)
    )
    return conversations, said(conversations)


def said(conversations):
    """What all hosts hear of the environment."""
    text = conversations.take(30)
    conversations.hear([text])
    (words,) = json.loads(text)
    return words


def answered(conversations, text, finish_reason=FinishReason.STOP):
    """What all hosts hear of its reply to an answer."""
    (request,) = [next(iter(conversations))]
    tokens = tuple(tiny.tokenizer().encode(text, add_special_tokens=False))
    values = (-1.0,) * len(tokens)
    conversations.answered(
        [
            Completion(
                prompt_id=request.prompt_id, generation_id=0, tokens=tokens, logprobs=values, sampled_logprobs=values,
                finish_reason=finish_reason,
            )
        ]
    )  # fmt: skip
    return said(conversations)


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (Returns(first=None), "TypeError: reset returned None, and must return a list of messages"),
        (Returns(first="How?"), "TypeError: reset returned 'How?', and must return a list of messages"),
        (Returns(first=Reply(done=True)), "reset returned Reply(messages=(), reward=0.0, done=True"),
        (Returns(first=[{"content": "How?"}]), "a message needs the texts 'role' and 'content'"),
        (Locked(), "Locked cannot be copied for each conversation (cannot pickle '_thread.lock' object). Make what"),
    ],
)
def test_what_cannot_begin_a_conversation_says_why(environment, error):
    conversations, words = begun(environment)
    assert error in words["error"] and not words.get("passing")
    (conversation,) = conversations.conversations
    assert conversation.ended and conversation.error == words["error"]
    assert conversations.rewards().dropped.tolist() == [True] and next(iter(conversations), None) is None


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (None, "TypeError: step returned None, and must return a lockstep.training.Reply"),
        (1.0, "TypeError: step returned 1.0, and must"),
        (([USER], 1.0, True), "TypeError: step returned ([{'role': 'user', 'content': 'More.'}], 1.0, True), and must"),
        (Reply(), "PromptError: step returned no message and done is false"),
        (Reply(messages=[USER | {"x": print}]), "a message has what JSON has not (Object of type builtin_function"),
        (Reply(messages=[USER | {"content": "\ud83d"}]), "a message with half a surrogate pair, '\\ud83d'"),
        (ExceptionGroup("two", [KeyError("a")]), "ExceptionGroup: two (1 sub-exception); KeyError: 'a' (test_conv"),
        (Reply(messages=[{"role": "user"}]), "PromptError: the message {'role': 'user'}; a message needs the texts"),
    ],
)
def test_what_cannot_follow_an_answer_says_why(reply, error):
    conversations, _ = begun(Returns(reply=reply))
    assert error in answered(conversations, "It is 3.")["error"]


@dataclasses.dataclass(kw_only=True)
class Spoils(Returns):
    """Changes what it is given."""

    async def reset(self, question: Any) -> Any:
        question.fields["seen"] = True
        return ()

    async def step(self, message: Any) -> Any:
        message["content"] = "changed"
        return await super().step(message)


def test_what_an_environment_changes_is_not_what_the_other_hosts_heard():
    conversations, _ = begun(Spoils(reply=Reply(done=True)))
    answered(conversations, "It is 3.")
    (conversation,) = conversations.conversations
    assert conversation.said == "It is 3."


@dataclasses.dataclass(kw_only=True)
class Endless(Returns):
    """Ends with nothing."""

    async def end(self) -> Any:
        return None


def test_the_end_of_a_conversation_is_a_reply():
    conversations, _ = begun(Endless(reply=Reply(messages=[USER]), max_turns=1))
    assert "end returned None, and must return a lockstep.training.Reply" in answered(conversations, "a")["error"]


def test_a_time_out_of_the_environments_own_is_not_its_limit():
    conversations, _ = begun(Returns(reply=TimeoutError("the database")))
    words = answered(conversations, "It is 3.")
    assert words["error"].startswith("TimeoutError: the database (test_conversations.py, line") and words["passing"]


def test_the_error_of_a_client_that_conversations_share_says_where_to_make_it():
    error = RuntimeError("<asyncio.locks.Event object> is bound to a different event loop")
    conversations, _ = begun(Returns(reply=error))
    said_last = answered(conversations, "It is 3.")["error"]
    assert "Each conversation has an event loop of its own: make clients in reset" in said_last


@pytest.mark.parametrize("done", [True, False])
def test_a_message_that_no_model_reads_is_not_stored_whole(done):
    huge = "x" * 100_000
    conversations, _ = begun(Returns(reply=Reply(messages=[{"role": "user", "content": huge}], done=done)))
    words = answered(conversations, "It is 3.")
    (message,) = words["messages"]
    assert words["done"] and message["content"] == f"{huge[:10_000]}… (100,000 characters)"


def test_the_error_of_an_environment_has_no_secret(monkeypatch):
    monkeypatch.setenv("WORLD_TOKEN", "sk-abcdef0123456789")
    conversations, _ = begun(Returns(reply=RuntimeError("x" * 450 + "sk-abcdef0123456789")))
    error = answered(conversations, "It is 3.")["error"]
    assert "sk-" not in error and "... (test_conversations.py, line" in error


@pytest.mark.parametrize("text", ["", " ", "�é漢字 🙂"])
def test_any_text_may_be_an_answer(text):
    conversations, _ = begun(Returns(reply=Reply(messages=[USER], reward=True)))
    words = answered(conversations, text)
    assert words["reward"] == 1.0 and words["tokens"] and not words["done"]
    assert answered(conversations, text)["messages"] == [USER], "and it goes on"


def test_a_conversation_ends_with_its_limit_of_turns_whatever_the_environment_says():
    conversations, _ = begun(Returns(reply=Reply(messages=[USER], reward=0.5), max_turns=2))
    assert not answered(conversations, "a")["done"] and answered(conversations, "b")["done"]
    assert conversations.rewards().total.tolist() == [1.0]


def test_calls_that_are_cut_or_two_in_an_answer_are_answered():
    call = '<tool_call>{"name": "multiply", "arguments": {"a": %d, "b": 3}}</tool_call>'
    conversations, _ = begun(Products())
    results = answered(conversations, call % 2 + call % 4)["messages"]
    assert [result["content"] for result in results] == ["6", "12"]
    cut = answered(conversations, (call % 5)[:30], FinishReason.LENGTH)
    assert cut["done"] and cut["reward"] == 0 and "</tool_call> is missing" in cut["messages"][0]["content"]
