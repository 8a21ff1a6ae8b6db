"""Episodes of verifiers, on real tasks: their tools, stops, users, rewards and failures."""

import asyncio
import dataclasses
import socket

import numpy as np
import pytest

from lockstep.training.data import GrpoDataConfig
from lockstep.training.rl import load_questions
from tests import environments, tiny
from tests import rollouts as runs
from tests.extras import NEEDS_VERIFIERS
from tests.unit.training.rl.test_verifiers_environment import TASKSETS, make

ADD = '<tool_call>{"name": "calculator_add", "arguments": {"a": 0, "b": %s}}</tool_call>'


@pytest.fixture(autouse=True)
def no_port(monkeypatch):
    """The tasksets can be imported, and no test opens a port."""
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setattr(socket.socket, "listen", lambda *arguments: pytest.fail("a port is opened"))
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail("a connection is made"))


async def talk(environment, question, *answers, end):
    """The first messages, and the reply to each answer and to the end."""
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
def test_a_model_learns_from_what_it_said_to_tasks_and_tools():
    """A random model with calls of an unknown tool as tokens; the task of every third question fails."""
    environment, tokenizer, tracker = make(timeout_s=60.0), environments.calling_tokenizer(), runs.Recorder()
    asked = load_questions(
        GrpoDataConfig(), tokenizer, row_length=128, max_new_tokens=4, seed=0, own=environment.questions()
    )
    run = {**environments.run(), "environment": environment}
    model = dataclasses.replace(tiny.CONFIG, max_seq_len=128)
    trainer, rollouts, model = runs.make(
        "auto", 1, tracker=tracker, run=run, vocab=-(-len(tokenizer) // 4) * 4, tokenizer=tokenizer, row=128,
        asked=asked, model=model,
    )  # fmt: skip
    spy = runs.train(trainer, rollouts, model)
    assert trainer.tracker.flush(60)
    figures, mask = tracker.scalars[1], np.array(spy.found[0]["loss_mask"])
    failed = figures["reward/environment/failed"]
    assert 0 < failed < runs.BATCH and figures["reward/environment/late"] == 0
    assert 0 <= figures["train/logprob_gap"] < 1e-5, "the tokens that are learned from are those that were sampled"
    turns_mean = figures["rollout/turns_mean"] * runs.BATCH / (runs.BATCH - failed)
    assert figures["rollout/environment/turns"] == pytest.approx(turns_mean) and turns_mean > 1
    assert figures["rollout/environment/calls"] == 0 and figures["reward/mean"] < 0
    turns = [turn for row in tracker.rows for turn in row.turns]
    assert {"system", "user", "assistant", "tool"} == {turn["role"] for turn in turns}
    assert any(turn["content"] == "error: there is no tool 'multiply'" for turn in turns if turn["role"] == "tool")
    assert (np.diff(mask.astype(int), axis=1) == 1).sum(axis=1).max() > 1, "rows with several answers"
