"""Tasks of verifiers, those of a real package, as questions, and settings that cannot work."""

import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.training.rl import Environment
from tests.extras import NEEDS_VERIFIERS

TASKSETS = Path(__file__).parents[3] / "verifiers_tasksets"


@pytest.fixture(autouse=True)
def tasksets(monkeypatch):
    """The tasksets can be imported."""
    monkeypatch.syspath_prepend(TASKSETS)


def make(taskset="lockstep-sums", **values):
    return Environment.get_choice_class("verifiers")(taskset=taskset, **values)


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
@pytest.mark.parametrize(
    ("taskset", "settings", "error"),
    [
        ("no-such-taskset", {}, "verifiers cannot load .*no-such-taskset"),
        ("lockstep-sums", {"size": 1}, "cannot load .*size"),
        ("lockstep-debate", {}, "Debate of .* has the agents pro, contra; only one, the model"),
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
