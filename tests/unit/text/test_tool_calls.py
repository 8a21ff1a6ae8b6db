"""Calls of tools, as the templates of Hermes and Qwen, Llama 3.1 and gpt-oss have them."""

import re

import pytest

from lockstep.text import ToolCall, split_calls, tool_calls

ANALYSIS = "<|channel|>analysis<|message|>I need {a sum}.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json"


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 3.", []),
        ("", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [call("add", a=1, b=2)]),
        (
            'Both. <tool_call>{"name": "x", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": {"n": {"m": [1]}}, "name": "y"}</tool_call>',
            [call("x"), call("y", n={"m": [1]})],
        ),
        ('<think>Should I <tool_call>?</think>\n\n<tool_call>{"name": "x", "arguments": {}}</tool_call>', [call("x")]),
        ('<think>{"name": "x"</think>No.', []),
        ('{"name": "add", "parameters": {"a": 1}}', [call("add", a=1)]),
        (' {"parameters": {"a": 1}, "name": "add"} ', [call("add", a=1)]),
        ('{"colour": "red"}', []),
        ('Write {"name": "add", "parameters": {}}', []),
        (ANALYSIS + CALL + '<|message|>{"a": 1}', [call("add", a=1)]),
        (ANALYSIS + CALL + '<|message|>{"a": 1}<|call|>', [call("add", a=1)]),
        ('<|channel|>commentary to=functions.add json<|message|>{"a": "<b>"}', [call("add", a="<b>")]),
        (" to=functions.add<|channel|>commentary <|constrain|>json<|message|>{}", [call("add")]),
        ("<|channel|>analysis to=functions.add code<|message|>{}", [call("add")]),
        (
            CALL + "<|message|>{}<|end|><|start|>assistant" + CALL + '<|message|>{"a": 2}',
            [call("add"), call("add", a=2)],
        ),
        (ANALYSIS + "<|channel|>final<|message|>Set to=5, or <tool_call>", []),
        ("<|channel|>commentary<|message|>I shall add them.", []),
    ],
)
def test_calls_are_read_in_the_formats_of_chat_templates(text, calls):
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "add", "arguments": {}}', "no end: </tool_call> is missing"),
        ("<tool_call>add(1, 2)</tool_call>", "is no JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "is no JSON"),
        ('<tool_call>["add"]</tool_call>', "needs a name and an object"),
        ('<tool_call>{"name": "add"}</tool_call>', "needs a name and an object"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "needs a name and an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "needs a name and an object"),
        ('{"name": "add", "parameters": {"a": 1', "is no JSON"),
        ('{"name": "add", "parameters": [1]}', "needs a name and an object"),
        (CALL + "<|message|>add(1, 2)", "is no JSON"),
        (CALL + '<|message|>{"a": 1', "is no JSON"),
        (CALL + "<|message|>", "is no JSON"),
        (CALL + "<|message|>[1, 2]", "a call of functions.add needs an object of arguments"),
        (CALL, "a call of functions.add has no arguments: <|message|> is missing"),
        (ANALYSIS + "<|channel|>commentary to=functions.add", "a call of functions.add has no arguments"),
        ("<|channel|>commentary to=python code<|message|>1 + 2", "is no JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_what_is_wrong(text, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        tool_calls(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It is 3.", [("text", "It is 3.")]),
        ("", []),
        ("<think>a</think>b", [("reasoning", "a"), ("text", "b")]),
        (
            'So: <tool_call>{"name": "add", "arguments": {"a": [1], "b": "é"}}</tool_call> then <tool_call>{',
            [("text", "So: "), ("call", 'add(a=[1], b="é")'), ("text", " then "), ("call", "{")],
        ),
        (
            ANALYSIS + "<|channel|>commentary<|message|>First:<|end|>" + CALL + '<|message|>{"a": 1}<|call|>',
            [("reasoning", "I need {a sum}."), ("reasoning", "First:"), ("call", "add(a=1)")],
        ),
        (ANALYSIS + "<|channel|>final<|message|>3", [("reasoning", "I need {a sum}."), ("text", "3")]),
    ],
)
def test_an_answer_is_split_where_its_calls_are(text, parts):
    assert [(part.kind, str(part.call or part.text)) for part in split_calls(text)] == parts
