"""Environments of OpenEnv, a real one in this process and at a server: observations, rewards, and wrong settings."""

import asyncio
import contextlib
import socket
import sys
import threading

import pytest

from lockstep.errors import ConfigError
from lockstep.text import Prompt
from lockstep.training import Reply
from lockstep.training.rl import Environment
from tests.extras import NEEDS_OPENENV

LOCAL = "tests.openenv_guess:Numbers"
QUESTION = Prompt(id=3, messages=({"role": "user", "content": "Play."},), answer="", fields={"level": 1})


def make(environment=LOCAL, **values):
    given = {"action": "guess", "observation": "hint"} | values
    return Environment.get_choice_class("openenv")(environment=environment, **given)


def talked(environment, *answers):
    async def talk():
        try:
            first = await environment.reset(QUESTION)
            return first, [await environment.step({"role": "assistant", "content": answer}) for answer in answers]
        finally:
            await environment.close()

    return asyncio.run(talk())


@contextlib.contextmanager
def served():
    """The address of a server of the environment, in a thread."""
    import uvicorn

    from tests.openenv_guess import app

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app(), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


def hint(text, **values):
    return Reply(messages=[{"role": "user", "content": text}], **values)


@NEEDS_OPENENV
@pytest.mark.parametrize("remote", [False, True])
def test_answers_are_actions_and_observations_are_messages(remote):
    with served() if remote else contextlib.nullcontext(LOCAL) as environment:
        first, replies = talked(make(environment), "1", "<think>Between.</think>7", "3")
    assert first == [{"role": "user", "content": "Play.\n\nGuess a number below 10."}]
    last = hint("Right.", reward=0.75, done=True)
    assert replies[:2] == [hint("More.", reward=-0.25), hint("Less.", reward=-0.25)]
    assert (replies[2].messages, replies[2].reward, replies[2].done) == (last.messages, last.reward, last.done)


@NEEDS_OPENENV
def test_arguments_fields_of_the_question_and_scores_of_the_rubric():
    environment = make(arguments={"most": 100}, reset_fields=["level"], observation=None)
    first, (reply,) = talked(environment, "4")
    assert first[0]["content"].endswith('\n\n{"hint": "Guess a number below 100."}')
    assert reply.done and reply.metrics == {"closeness": 1.0}


@NEEDS_OPENENV
@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"environment": "tests.openenv_guess:Missing"}, "has no function 'Missing'"),
        (
            {"observation": "text"},
            "environment.observation is 'text', and an observation has done, reward, metadata, hint",
        ),
        ({"action": "message"}, "environment.action is 'message', and .*:Numbers annotates .* has no such field"),
    ],
)
def test_settings_that_cannot_work(values, error):
    with pytest.raises(ConfigError, match=error):
        talked(make(**values), "4")


def test_a_server_makes_its_actions_and_a_client_is_needed(monkeypatch):
    with pytest.raises(ConfigError, match="environment.action_class is a:B, and environment.environment is a URL"):
        make("http://localhost:1", action_class="a:B")
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=r"environment.type is openenv, .* 'jax-lockstep\[openenv\]' on every host"):
        talked(make("http://localhost:1"))
