"""Chats as text, and the places of the answers in it."""

import json
from pathlib import Path

import pytest

from lockstep.text import load_tokenizer
from lockstep.training.data.chats import chat_of, messages_of, whole_chat
from lockstep.training.data.records import BadRow
from tests.unit.training.data.test_examples import TURNS, chat, merging


def parts(found):
    return [found.text[begin:end] for begin, end in found.answers]


def test_the_last_answer_is_behind_the_text_of_its_prompt():
    found = chat_of(merging(), chat("ok"))
    assert parts(found) == ["ok"] and found.text == "<user>\nq?<assistant>\nok"


def test_every_answer_of_a_whole_chat_is_where_it_is_written():
    messages = [{"role": role, "content": content} for role, content in TURNS]
    found = whole_chat(merging(), messages)
    assert parts(found) == [content for role, content in TURNS if role == "assistant"]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (chat("ok")[:1], "(chosen) has 1 messages and ends with role 'user'"),
        ([*chat("ok")[:1], {"role": "assistant", "content": None}], "(chosen) has an answer without a text"),
    ],
)
def test_a_chat_without_an_answer_is_a_bad_row(messages, text):
    with pytest.raises(BadRow) as caught:
        chat_of(merging(), messages, "(chosen) ")
    assert str(caught.value).startswith(text)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}]
OF_TOOLS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>
{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}!{% else %}{{ m.content }}{% endif %}{% endfor %}
{% if add_generation_prompt %}<assistant>
{% endif %}"""
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}


@pytest.fixture
def tokenizer():
    return load_tokenizer(Path(__file__).parents[4] / "data" / "demo" / "tokenizer")


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [{**TOOLS[0], "strict": None}]])
def test_the_template_describes_the_tools_of_a_record(tokenizer, tools):
    tokenizer.chat_template = OF_TOOLS
    assert chat_of(tokenizer, chat("ok"), tools=tools).text.startswith(json.dumps(TOOLS))
    assert parts(whole_chat(tokenizer, [*chat("ok")[:1], CALL], tools=tools)) == ["add!"]


@pytest.mark.parametrize(
    ("messages", "tools", "text"),
    [
        (chat("ok"), TOOLS, "does not mention tools, which the chat has"),
        ([*chat("ok")[:1], CALL], None, "does not mention tool_calls, which the chat has"),
        (chat("ok"), "a hammer", "'tools' is not JSON"),
        (chat("ok"), [1], "which is no list of functions"),
        ([*chat("ok")[:1], {**chat("ok")[1], "weight": 0}], None, "has an answer of weight 0 last"),
    ],
)
def test_what_a_chat_would_lose_is_a_bad_row(tokenizer, messages, tools, text):
    tokenizer.chat_template = (
        OF_TOOLS.replace("tools | tojson", "x").replace("tools", "x").replace("tool_calls", "calls")
    )
    with pytest.raises(BadRow, match=text):
        chat_of(tokenizer, messages, tools=tools)


def test_calls_are_lost_where_the_template_writes_something_else_as_json(tokenizer):
    messages = [*chat("ok")[:1], {**CALL, "content": ""}]
    for of_message in ("{{ m.content | tojson }}", "{{ (m if m.role == 'user' else m.role) | tojson }}"):
        tokenizer.chat_template = f"{{{{ tools | tojson }}}}{{% for m in messages %}}{of_message}{{% endfor %}}"
        with pytest.raises(BadRow, match="does not mention tool_calls, which the chat has"):
            chat_of(tokenizer, messages, tools=TOOLS)
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    assert '"name": "add"' in chat_of(tokenizer, messages).text
    with pytest.raises(BadRow, match="does not mention tools, which the chat has"):
        chat_of(tokenizer, messages, tools=TOOLS)


def test_an_answer_of_weight_0_is_no_target():
    first, *rest = [{"role": role, "content": content} for role, content in TURNS]
    answers = [message for message in rest if message["role"] == "assistant"]
    answers[0]["weight"] = 0
    assert parts(whole_chat(merging(), [first, *rest])) == [message["content"] for message in answers[1:]]


def test_messages_are_without_the_nulls_of_a_column():
    record = {"messages": [{"role": "user", "content": "q?", "tool_calls": None}]}
    assert messages_of(record) == [{"role": "user", "content": "q?"}]
