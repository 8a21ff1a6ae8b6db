"""Tasks of verifiers, those of a real package: their tools, stops, users, rewards and failures."""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.training.rl import Environment
from tests.extras import NEEDS_VERIFIERS

TASKSETS = Path(__file__).parents[3] / "verifiers_tasksets"
ADD = '<tool_call>{"name": "calculator_add", "arguments": {"a": 0, "b": %s}}</tool_call>'


@pytest.fixture(autouse=True)
def no_port(monkeypatch):
    """No test opens a port, and the tasksets can be imported."""
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setattr(socket.socket, "listen", lambda *arguments: pytest.fail("a port is opened"))
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("a connection is made"))


def make(taskset="lockstep-sums", **values):
    return Environment.get_choice_class("verifiers")(taskset=taskset, **values)


async def talk(environment, question, *answers, end=False):
    """What is asked first, and the reply to each answer."""
    with contextlib.closing(contextlib.ExitStack()):
        try:
            replies = [await environment.reset(question)]
            for answer in answers:
                replies.append(await environment.step({"role": "assistant", "content": answer}))
            return [*replies, await environment.end()] if end else replies
        finally:
            await environment.close()


def talked(environment, *answers, number=0, end=False):
    question = list(environment.questions())[number]
    first, *replies = asyncio.run(talk(environment, question, *answers, end=end))
    assert tuple(first) == question.messages
    return replies


@NEEDS_VERIFIERS
def test_tasks_are_questions_and_tools_are_described():
    environment = make(settings={"count": 2})
    first, second = environment.questions()
    assert [(message["role"], message["content"]) for message in first.messages] == [
        ("system", "Add."), ("user", "What is 0 + 2?"),
    ]  # fmt: skip
    assert second.fields == {"idx": 1}
    (tool,) = environment.tools()
    assert tool["function"]["name"] == "calculator_add" and set(tool["function"]["parameters"]["properties"]) == set(
        "ab"
    )


@NEEDS_VERIFIERS
def test_tools_are_called_and_the_answer_without_a_call_is_rewarded():
    called, wrong, last = talked(make(), ADD % 2, ADD % '"two"', "<think>2?</think>It is 2.")
    assert [dict(message) for message in called.messages] == [
        {"role": "tool", "name": "calculator_add", "content": "2"}
    ]
    assert wrong.messages[0]["content"].startswith("error: ") and not wrong.done
    assert last.done and last.reward == 2.0 - 0.5 * 3
    assert last.metrics == {"calls": 1.0, "right": 1.0, "turns": 3.0}
    (unread,) = talked(make(), "<tool_call>add(1, 2)</tool_call>")
    assert unread.done and unread.reward == -0.5, "as servers of models do it, a call that cannot be read is text"


@NEEDS_VERIFIERS
def test_a_stop_of_the_task_a_limit_and_the_end_are_scored_as_they_are():
    *_, stopped = talked(make(), *[ADD % 2] * 3)
    assert stopped.done and stopped.reward == -1.5 and stopped.metrics["calls"] == 3
    (limited,) = talked(make(max_turns=1), ADD % 2)
    assert limited.done and limited.reward == -0.5 and limited.metrics["turns"] == 1
    called, ended = talked(make(), ADD % 2, end=True)
    assert not called.done and ended.reward == -0.5 and ended.metrics["calls"] == 1


@NEEDS_VERIFIERS
def test_an_environment_of_several_turns_answers_the_model():
    more, less, right = talked(make("lockstep-guesses"), "3", "9", "7")
    assert [reply.messages[0] for reply in (more, less)] == [
        {"role": "user", "content": "More."}, {"role": "user", "content": "Less."},
    ]  # fmt: skip
    assert right.done and right.reward == 1.0
    with pytest.raises(RuntimeError, match="invalid literal for int"):
        talked(make("lockstep-guesses"), "three")


@NEEDS_VERIFIERS
def test_a_task_that_fails_is_an_error():
    environment = make()
    with pytest.raises(RuntimeError, match="no such world"):
        talked(environment, "It is 3.", number=1)


@NEEDS_VERIFIERS
@pytest.mark.parametrize(
    ("taskset", "settings", "error"),
    [
        ("no-such-taskset", {}, "verifiers cannot load .*no-such-taskset"),
        ("lockstep-sums", {"size": 1}, "cannot load .*size"),
    ],
)
def test_what_cannot_be_loaded_is_named(taskset, settings, error):
    with pytest.raises(ConfigError, match=error):
        list(make(taskset, settings=settings).questions())


def test_a_host_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lockstep.training.rl.verifiers_episode", None)
    with pytest.raises(
        ConfigError, match=r"environment.type is verifiers, .* 'jax-lockstep\[verifiers\]' on every host"
    ):
        make().tools()
