import asyncio
import dataclasses
import json
import math
import runpy

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.text import Prompt
from lockstep.training import Environment, Reply, ToolEnvironment
from tests.environments import Parity


def test_a_conversation_begins_with_the_question_unless_the_environment_says_otherwise():
    messages = ({"role": "user", "content": "What is 2 plus 2?"},)
    assert asyncio.run(Environment().reset(Prompt(id=0, messages=messages, answer="4"))) == messages
    assert asyncio.run(Environment().reset(Prompt(id=0, text="2 + 2 =", answer="4"))) == ()


def test_an_environment_has_to_reply():
    with pytest.raises(NotImplementedError, match=r"Environment has no step\(message\)"):
        asyncio.run(Environment().step({"role": "assistant", "content": "4"}))
    assert Reply() == Reply(messages=(), reward=0.0, done=False)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_turns": 0}, "environment.max_turns is 0; it must be at least 1"),
        ({"timeout_s": 0}, "environment.timeout_s is 0; it must be more than 0 seconds"),
        ({"every": "five"}, "environment.every is 'five'; it must be a whole number"),
    ],
)
def test_settings_that_cannot_work(values, text):
    with pytest.raises(ConfigError, match=text):
        Parity(**values)


@dataclasses.dataclass(kw_only=True)
class AtOnce(Parity):
    def step(self, message):
        return Reply(done=True)


@dataclasses.dataclass(kw_only=True)
class Awaited(Parity):
    async def tools(self):
        return []


@dataclasses.dataclass(kw_only=True)
class Listed(Parity):
    tools = []


@dataclasses.dataclass(kw_only=True)
class ScoresAtOnce(ToolEnvironment):
    def score(self, answer):
        return 1.0


class Undecorated(Parity):
    def __init__(self, letter):
        self.letter = letter


def test_classes_that_are_written_otherwise_are_refused():
    with pytest.raises(ConfigError, match="step of AtOnce is no coroutine function. Write async def step"):
        AtOnce()
    with pytest.raises(ConfigError, match="tools of Awaited is a coroutine function. Write def tools"):
        Awaited()
    with pytest.raises(ConfigError, match=r"tools of Listed is \[\]. Write def tools"):
        Listed()
    with pytest.raises(ConfigError, match="score of ScoresAtOnce is no coroutine function. Write async def score"):
        ScoresAtOnce()
    with pytest.raises(ConfigError, match=r"Undecorated has an __init__ of its own.* put @dataclasses.dataclass"):
        Environment.get_choice_class(f"{__name__}:Undecorated")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"reward": math.nan}, "Reply: reward is nan; it must be finite"),
        ({"metrics": {"right": -math.inf}}, "Reply: right is -inf; it must be finite"),
        ({"reward": None}, "Reply.reward is None; it must be a number"),
        ({"metrics": {"right": "yes"}}, "Reply.metrics.right is 'yes'; it must be a number"),
        ({"messages": {"role": "user", "content": "x"}}, "it must be a list"),
    ],
)
def test_a_reply_that_cannot_be_used_says_so(values, text):
    with pytest.raises(ConfigError, match=text):
        Reply(**values)


def test_a_reward_may_be_a_comparison_or_a_number_of_numpy():
    assert Reply(reward=True, metrics={"right": False}).reward == 1
    assert Reply(reward=np.float32(0.5), metrics={"turns": np.int64(2)}) == Reply(reward=0.5, metrics={"turns": 2})


def test_it_is_named_by_its_module_and_class():
    assert Environment.get_choice_class("tests.environments:Parity") is Parity
    with pytest.raises(ConfigError, match="'tests.environments:run' is not a subclass of Environment"):
        Environment.get_choice_class("tests.environments:run")


def test_the_example_computes_once_and_compares_the_last_number():
    calculator = runpy.run_path("examples/agent_demo/calculator.py")["Calculator"]()
    asked = {"role": "user", "content": "What is 12 plus 7?"}
    question = Prompt(id=0, messages=(asked,), answer="12 + 7 = 19\n#### 19")
    assert asyncio.run(calculator.reset(question)) == (asked,)

    def said(text):
        return asyncio.run(calculator.step({"role": "assistant", "content": text}))

    def called(expression):
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        (message,) = said(f"<tool_call>{call}</tool_call>").messages
        return message["content"]

    assert called(" 2 * (12 + 7) - 1") == "37"
    assert "only +, - and *" in called("__import__") and "SyntaxError" in called("9 **") and "51" in called("1" * 51)
    assert said("It is 19.") == Reply(reward=1.0, done=True) and said("It is 91.") == Reply(reward=0.0, done=True)


def test_a_wrong_number_is_asked_for_again():
    retry = Environment.get_choice_class("retry")(hint="No.", discount=0.5)

    def talked(*answers):
        asyncio.run(retry.reset(Prompt(id=0, text="What is 12 plus 7?", answer="12 + 7 = 19\n#### 19")))
        return [asyncio.run(retry.step({"role": "assistant", "content": answer})) for answer in answers]

    assert talked("#### 19.0") == [Reply(reward=1.0, done=True)]
    wrong = Reply(messages=[{"role": "user", "content": "No."}])
    assert talked("20", "no idea", "<think>20</think>19") == [wrong, wrong, Reply(reward=0.25, done=True)]
    with pytest.raises(ValueError, match="the reference answer 'red' has no number"):
        asyncio.run(retry.reset(Prompt(id=0, text="Which colour?", answer="red")))
