import asyncio
import dataclasses
import functools
import os
from typing import Any, Literal

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.text import Prompt, set_tools, tokenizer_digest, tool_calls
from lockstep.text.tokenize import chat_text
from lockstep.training import Reply, ToolEnvironment
from tests import tiny

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
HERMES = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + PLAIN


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def look_up(word: str) -> dict:
    """Look up a word.

    Args:
        word: The word.
    """
    if word == "secret":
        raise ConnectionError(f"no {os.environ['WORDS_KEY']} of https://me:letmein@words.example/api?key=letmein")
    if word == "quit":
        raise SystemExit(3)
    if word == "é":
        return {"é": None}
    raise LookupError("no such word")


def undescribed(a):
    return a


@dataclasses.dataclass(kw_only=True)
class Sums(ToolEnvironment):
    def tools(self):
        return [add, look_up]

    async def reset(self, question):
        self.answer = question.answer
        return await super().reset(question)

    async def score(self, answer):
        return float(self.answer in answer)


@pytest.mark.parametrize("text", ["<tool_call>add(1, 2)</tool_call>", '{"name": "add", "parameters": [1]}'])
def test_a_call_that_cannot_be_read_is_answered_with_what_is_wrong(text):
    with pytest.raises(ValueError, match="call") as error:
        tool_calls(text)
    assert said(text) == Reply(messages=[{"role": "tool", "content": f"error: {error.value}"}])


def said(*texts):
    environment = Sums()

    async def talk():
        await environment.reset(Prompt(id=0, messages=({"role": "user", "content": "1 + 2?"},), answer="3"))
        return [await environment.step({"role": "assistant", "content": text}) for text in texts]

    return asyncio.run(talk())[-1]


def test_results_and_errors_are_messages_and_the_answer_without_calls_is_the_last(monkeypatch):
    monkeypatch.setenv("WORDS_KEY", "sk-abcdef0123456789")

    def written(name, arguments):
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    reply = said("".join(written("add", '{"a": 1, "b": 2}') + written("look_up", '{"word": "é"}')))
    assert reply == Reply(
        messages=[
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "tool", "name": "look_up", "content": '{"é": null}'},
        ]
    )
    for name, arguments, error in (
        ("subtract", "{}", "there is no tool 'subtract', only add, look_up"),
        ("add", '{"a": 1}', "missing 1 required positional argument: 'b'"),
        ("add", '{"a": 1, "b": null}', "unsupported operand"),
        ("look_up", '{"word": "a"}', "error: LookupError: no such word"),
        ("look_up", '{"word": "quit"}', "error: SystemExit: 3"),
        ("look_up", '{"word": "secret"}', "error: ConnectionError: no <redacted> of https://words.example/api?…"),
    ):
        (message,) = said(written(name, arguments)).messages
        assert message["name"] == name and error in message["content"]
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'
    assert said(call) == Reply(messages=[{"role": "tool", "name": "add", "content": "3"}])
    assert said("It is 3.") == Reply(reward=1.0, done=True) and said("It is 4.") == Reply(reward=0.0, done=True)


def described(chat):
    """What transformers' template makes of a chat and the tools of `Sums`."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HERMES
    return tokenizer.apply_chat_template(chat, tools=[add, look_up], tokenize=False, add_generation_prompt=True)


def test_the_chat_template_describes_tools_as_transformers_does():
    tokenizer, plain = tiny.tokenizer(), tiny.tokenizer()
    tokenizer.chat_template = plain.chat_template = HERMES
    chat = [{"role": "user", "content": "1 + 2?"}]
    set_tools(tokenizer, Sums().tools())
    expected = described(chat)
    assert '"Add two whole numbers."' in expected and '"The word."' in expected
    assert chat_text(tokenizer, chat, add_generation_prompt=True) == expected
    assert tokenizer_digest(tokenizer) != tokenizer_digest(plain), "hosts agree on them, and a resume has the same"


@pytest.mark.parametrize(
    ("template", "tool", "error"),
    [
        (PLAIN, add, "does not mention: the model would not know of them"),
        (HERMES, undescribed, "the tool 'undescribed' of the environment cannot be described"),
    ],
)
def test_tools_that_the_model_could_not_know_are_refused(template, tool, error):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=error):
        set_tools(tokenizer, [tool])


@dataclasses.dataclass
class Point:
    x: int


def returned(value):
    """What the model reads of a tool's result."""

    def tool():
        """Do it."""
        return value

    @dataclasses.dataclass(kw_only=True)
    class One(ToolEnvironment):
        def tools(self):
            return [tool]

    call = {"role": "assistant", "content": '<tool_call>{"name": "tool", "arguments": {}}</tool_call>'}
    (message,) = asyncio.run(One().step(call)).messages
    return message["content"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(1.5), "1.5"),
        (np.arange(3), "[0, 1, 2]"),
        ({"n": np.int64(2), "at": Point(x=1)}, '{"n": 2, "at": {"x": 1}}'),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ("half \ud83d", "half ?"),
        (Point, f'"{Point}"'),
        (None, "null"),
    ],
)
def test_results_are_read_as_json_has_them(value, text):
    assert returned(value) == text


def takes(annotation):
    """A tool whose only argument has a type."""

    def tool(a):
        """Do it.

        Args:
            a: What.
        """

    tool.__annotations__["a"] = annotation
    return tool


def variadic(*words: str):
    """Do it.

    Args:
        words: Some.
    """


def positional(word: str, /):
    """Do it.

    Args:
        word: One.
    """


def yields():
    """Do it."""
    yield 1


async def yields_later():
    """Do it."""
    yield 1


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ([yields], r"'yields' .* cannot be described \(it yields; a tool is a function with def that returns"),
        ([yields_later], r"it yields; a tool"),
        ([functools.partial(add, a=1)], r"it is an object of the class partial; a tool is a function with def"),
        ([takes(Point)], r"the tool 'tool' .*\(a has the type Point, and a call gives what JSON has"),
        ([takes(list[Point] | None)], "a has the type Point"),
        ([takes(bytes)], "a has the type bytes"),
        ([variadic], r"\*words: str has no name that a call could give a value"),
        ([positional], r"word: str has no name that a call could give a value"),
        ([add, add], "the environment has two tools called 'add'"),
        (add, r"tools\(\) of the environment returned <function add .* must be a list"),
    ],
)
def test_tools_that_no_call_could_use_are_refused(tools, error):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HERMES
    with pytest.raises(ConfigError, match=error):
        set_tools(tokenizer, tools)


@pytest.mark.parametrize("annotation", [Literal["a", "b"], dict[str, list[int]], int | None, tuple[int, str], Any])
def test_arguments_may_be_what_json_has(annotation):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HERMES
    set_tools(tokenizer, [takes(annotation)])


def test_an_environment_that_calls_tools_needs_functions():
    @dataclasses.dataclass(kw_only=True)
    class Described(ToolEnvironment):
        def tools(self):
            return [{"type": "function", "function": {"name": "add"}}]

    call = {"role": "assistant", "content": '<tool_call>{"name": "add", "arguments": {}}</tool_call>'}
    with pytest.raises(TypeError, match=r"tools\(\) of Described returned .*'add'.*, which are not functions"):
        asyncio.run(Described().step(call))


def test_an_environment_says_how_it_scores():
    with pytest.raises(NotImplementedError, match=r"ToolEnvironment has no score\(answer\)"):
        asyncio.run(ToolEnvironment().step({"role": "assistant", "content": "4"}))
