"""Conversations as lines: in the table of a tracker, at a terminal, in a report."""

from lockstep.report import conversation_text
from lockstep.report.turns import speaker, turn_lines
from lockstep.text import tool_calls

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37 + 45"}}</tool_call>'
TURNS = [
    {"role": "user", "content": "What is 37 + 45?"},
    {"role": "assistant", "content": f"<think>Hm.</think>{CALL}", "reward": 0.0},
    {"role": "tool", "name": "calculator", "content": "82"},
    {"role": "assistant", "content": "It is\n82.", "reward": 1.0},
]
"""A conversation as a file of rows has it."""


def test_a_conversation_is_read_from_the_first_answer_on():
    assert conversation_text(TURNS).splitlines() == [
        'assistant: (Hm.) → calculator(expression="37 + 45")',
        "tool calculator: 82",
        "assistant: It is",
        "82.",
    ]
    assert tool_calls(TURNS[1]["content"])[0].arguments == {"expression": "37 + 45"}


def test_a_call_that_cannot_be_read_is_shown_as_it_is():
    turn = {"role": "assistant", "content": "<tool_call>add(1)</tool_call>"}
    assert turn_lines([turn]) == ["assistant: → add(1)"] and speaker(turn) == "assistant"
    given = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    assert turn_lines([given]) == ['assistant: [{"function": {"name": "add", "arguments": "{}"}}]']
