"""What a ``tasks`` block refuses, and when tasks are due."""

import pytest

from lockstep.callback import InferenceEvalConfig
from lockstep.callback.evaluation import TasksConfig
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"names": "gsm8k"}, r"names is 'gsm8k'; it must be a list. Use \['gsm8k'\]"),
        ({"names": ["a", "a"]}, "has a task twice"),
        ({"names": ["a", ""]}, "has an empty name"),
        ({"limit": 3}, "tasks.limit is 3 and tasks.names is empty, so that it has no effect"),
        ({"names": ["a"], "limit": 0}, "limit is 0; it must be at least 1, or null"),
        ({"names": ["a"], "num_fewshot": -1}, "num_fewshot is -1"),
        ({"names": ["a"], "max_seq_len": 1}, "max_seq_len is 1"),
        ({"names": ["a"], "max_seconds": 0}, "max_seconds is 0"),
    ],
)
def test_a_value_that_cannot_work_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        TasksConfig(**values)


def test_tasks_come_with_rounds():
    with pytest.raises(ConfigError, match="every is 30, which is no multiple of eval_every, 20"):
        InferenceEvalConfig(prompts=["one"], eval_every=20, tasks=TasksConfig(names=["a"], every=30))
    config = TasksConfig(names=["a"], every=40)
    assert [step for step in range(0, 100, 20) if config.due(step, last=False)] == [0, 40, 80]
    assert config.due(90, last=True) and not TasksConfig().due(40, last=True)
    assert TasksConfig(names=["a"]).due(20, last=False)
