"""Environments of verifiers and OpenEnv on two hosts: the conversations of one host, and failures on one of the two."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lockstep.training.data import GrpoDataConfig
from lockstep.training.rl import Environment, load_questions
from tests import environments, tiny
from tests import rollouts as runs
from tests.extras import NEEDS_OPENENV, NEEDS_VERIFIERS
from tests.multiprocess.harness import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TASKSETS = Path(__file__).parents[1] / "verifiers_tasksets"
ROW = 128
LETTERS = {"type": "verifiers", "taskset": "lockstep-letters", "max_turns": 2}
SUMS = {"type": "verifiers", "taskset": "lockstep-sums", "settings": {"count": 8}, "max_turns": 2}
OPENENV = {
    "type": "openenv", "environment": "tests.openenv_guess:Letters", "action": "guess", "observation": "hint",
}  # fmt: skip


def of_verifiers(values: dict[str, Any], name: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(values, id=name, marks=(NEEDS_VERIFIERS, *marks))


def of_openenv(*marks: pytest.MarkDecorator) -> Any:
    return pytest.param(OPENENV, id="openenv", marks=(NEEDS_OPENENV, *marks))


def body_train(hosts: Any, values: dict[str, Any], failures: dict[int, str] | None = None) -> dict[str, Any]:
    """Two steps in float32, and what was said in their conversations.

    Args:
        failures: How environments fail on the last host, by the numbers of their questions.
    """
    settings = dict(values)
    make = Environment.get_choice_class(settings.pop("type"))
    with mock.patch.object(sys, "path", [str(TASKSETS), *sys.path]):
        environment = make(timeout_s=15.0 if failures else 40.0, **settings)
        tokenizer, tracker = environments.calling_tokenizer("calculator_add"), runs.Recorder()
        own = environment.questions()
        asked = own and load_questions(GrpoDataConfig(), tokenizer, row_length=ROW, max_new_tokens=4, seed=0, own=own)
        if failures and hosts.index == hosts.count - 1:
            name = "tests.openenv_guess" if own is None else "lockstep_letters"
            importlib.import_module(name).FAILURES.update(failures)
        made = runs.make(
            "auto", 2, hosts, tracker=tracker, run={**environments.run(), "environment": environment},
            vocab=-(-len(tokenizer) // 4) * 4, tokenizer=tokenizer, row=ROW, asked=asked or None,
            model=dataclasses.replace(tiny.CONFIG, max_seq_len=ROW),
        )  # fmt: skip
        sample, sampled = made[1]._sampler.sample, []
        made[1]._sampler.sample = lambda *arguments: sampled.append(sample(*arguments)) or sampled[-1]
        spy = runs.train(*made)
    assert made[0].tracker.flush(60)
    conversations = [conversation for rollout in sampled for conversation in rollout.conversations]
    return {
        "questions": [conversation.question for conversation in conversations],
        "messages": [conversation.messages for conversation in conversations],
        "errors": [conversation.error for conversation in conversations],
        "columns": spy.found,
        "losses": spy.losses,
        "scalars": {str(step): scalars for step, scalars in tracker.scalars.items()},
    }


@pytest.mark.nightly  # in make slow: two hosts below, and the environments in unit/training/rl
@pytest.mark.parametrize(
    "values", [of_verifiers(LETTERS, "verifiers"), of_openenv(), of_verifiers(SUMS, "verifiers-tools")]
)
def test_conversations_on_two_hosts_are_those_on_one(values):
    own = "the packages set up logging and threads of their own"
    leader, other = run_processes(body_train, processes=2, devices=2, args=(values,), timeout_s=240, own=own)
    (alone,) = run_processes(body_train, processes=1, devices=4, args=(values,), timeout_s=240, own=own)
    for name in ("questions", "messages", "errors", "columns", "losses"):
        assert leader[name] == other[name], name
    # A text of a task's error may have the name of its run.
    assert [error is None for error in leader["errors"]] == [error is None for error in alone["errors"]]
    assert leader["questions"] == alone["questions"] and leader["messages"] == alone["messages"]
    for number, columns in leader["columns"].items():
        assert columns["tokens"] == alone["columns"][number]["tokens"]
        assert columns["loss_mask"] == alone["columns"][number]["loss_mask"]
        runs.assert_close(columns, alone["columns"][number])
    turns = [sum(message["role"] == "assistant" for message in messages) for messages in leader["messages"]]
    assert max(turns) == values.get("max_turns", 2) and leader["scalars"]["1"]["reward/std"] > 0
    said = [message["content"] for messages in leader["messages"] for message in messages if message["role"] == "tool"]
    assert (values is SUMS) == any(text.isdigit() for text in said), "a tool has answered"


@pytest.mark.parametrize("values", [of_verifiers(LETTERS, "verifiers"), of_openenv(pytest.mark.nightly)])
def test_a_failure_on_one_host_drops_its_groups_on_both(values):
    failures = {2: "raise", 4: "hang"}
    leader, other = run_processes(
        body_train, processes=2, devices=2, args=(values, failures), timeout_s=240, own="environments are left behind"
    )
    for name in ("questions", "messages", "errors", "columns", "losses"):
        assert leader[name] == other[name], name
    questions, errors = leader["questions"][: runs.BATCH], leader["errors"][: runs.BATCH]
    learned = np.array(leader["columns"]["0"]["loss_mask"]).any(axis=1)
    assert set(failures) <= set(questions), "the rollout has the questions that fail"
    for number, (question, error) in enumerate(zip(questions, errors, strict=True)):
        fails = number % 2 == 1 and question in failures
        assert (error is not None) == fails and learned[number] == (question not in failures)
        assert error is None or (failures[question] == "hang") == (error == "late") or "no such world" in error
    assert np.isfinite(leader["losses"]).all()
