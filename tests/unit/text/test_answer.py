"""The parts of answers, as templates mark them."""

import json
from pathlib import Path

import pytest

from lockstep.text import Answer, split_answer
from lockstep.text.answer import channel_messages

HARMONY = "<|channel|>analysis<|message|>12 + 7 = 19, not 20.<|end|><|start|>assistant"
CASES = {
    "plain": ("19", "", None, "19"),
    "thought": ("<think>\n12 + 7\n</think>\n\n19", "", "12 + 7", "19"),
    "opened by the prompt": ("12 + 7\n</think>\n\n19", "<|Assistant|><think>\n", "12 + 7", "19"),
    "opened and not closed": ("12 + 7 = 19", "<think>\n", "12 + 7 = 19", ""),
    "not closed": ("<think>12 + 7 = 19", "", "12 + 7 = 19", ""),
    "twice": ("<think>a</think>b<think>c</think>d", "", "ab" "c", "d"),
    "closed by the prompt": ("19", "<think>\n\n</think>\n\n", None, "19"),
    "no marker": ("Use the <think> tag.", "", None, "Use the <think> tag."),
    "of a question": ("19", "What does <think> mean?", None, "19"),
    "Magistral": ("[THINK]12 + 7[/THINK]19", "", "12 + 7", "19"),
    "Seed": ("<seed:think>12 + 7</seed:think>19", "", "12 + 7", "19"),
    "Kimi": ("◁think▷12 + 7◁/think▷19", "", "12 + 7", "19"),
    "Command": ("<|START_THINKING|>12 + 7<|END_THINKING|>19", "", "12 + 7", "19"),
    "harmony": (HARMONY + "<|channel|>final<|message|>19", "", "12 + 7 = 19, not 20.", "19"),
    "harmony, final alone": ("<|channel|>final<|message|>19", "", None, "19"),
    "harmony, opened": (
        "12 + 7<|end|><|start|>assistant<|channel|>final<|message|>19",
        "<|channel|>analysis<|message|>",
        "12 + 7",
        "19",
    ),
    "harmony, final opened": ("19", "<|start|>assistant<|channel|>final<|message|>", None, "19"),
    "harmony, cut": (HARMONY[:40], "", HARMONY[:40].removeprefix("<|channel|>analysis<|message|>"), ""),
    "harmony, cut before a message": (HARMONY + "<|channel|>fin", "", "12 + 7 = 19, not 20.", ""),
    "harmony, a tool": (
        HARMONY + "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 12}",
        "",
        '12 + 7 = 19, not 20.\n{"a": 12}',
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_its_reasoning_and_its_content(name):
    text, end, reasoning, content = CASES[name]
    assert split_answer(text, end) == Answer(text=text, reasoning=reasoning, content=content)


OTHERWISE = {
    '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>': [["final", None, '{"a": 1}']],
    "<|channel|>commentary json<|message|>{}<|call|>": [["commentary", None, "{}"]],
    "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>": [
        ["analysis", None, "a"], ["final", None, "b"],
    ],
}  # fmt: skip
"""Messages that we read otherwise: harmony takes a type for a recipient, and does not end a message at a channel."""


def test_messages_of_gpt_oss_are_those_of_openai_harmony():
    rows = json.loads((Path(__file__).parents[2] / "golden" / "harmony.json").read_text(encoding="utf-8"))
    refused = []
    for row in rows:
        messages = [[message.channel, message.recipient, message.body] for message in channel_messages(row["text"])]
        if "error" in row:
            refused.append(messages)
        else:
            assert messages == OTHERWISE.get(row["text"], row["messages"]), row["text"]
            assert (row["text"] in OTHERWISE) == (messages != row["messages"])
    thought = ["analysis", None, "I need {a sum}."]
    assert refused == [[thought], [thought], [["analysis", None, "a"]]], "of what it refuses, all that is whole"
