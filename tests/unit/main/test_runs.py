"""The command line of ``lockstep eval``."""

import pytest

from lockstep.batch_inference import EvalConfig
from lockstep.callback.evaluation import TasksConfig
from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.main.runs import name_tasks


@pytest.mark.parametrize(
    "words",
    [
        ["some/run", "--tasks", "a,own/b.yaml", "--tasks.limit", "3"],
        ["--tasks=a, own/b.yaml", "some/run", "--tasks.limit=3"],
        ["some/run", "--tasks", "[a, own/b.yaml]", "--tasks.limit", "3"],
        ["--checkpoint", "some/run", "--tasks", "{names: [a, own/b.yaml]}", "--tasks.limit", "3"],
    ],
)
def test_the_command_line(words):
    config = parse_arguments(EvalConfig, name_tasks(words))
    assert config == EvalConfig(checkpoint="some/run", tasks=TasksConfig(names=["a", "own/b.yaml"], limit=3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["some/run", "other", "--tasks", "a"], "'other' is one word too many"),
        (["some/run"], "there are no tasks. Name some: --tasks"),
        (["some/run", "--tasks"], "argument --tasks has no value"),
        (
            ["some/run", "--tasks", "a", "--tasks.every", "3"],
            "tasks.every is 3, which has no effect in eval. It is for training",
        ),
    ],
)
def test_a_command_line_that_cannot_work(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_arguments(EvalConfig, name_tasks(words))
