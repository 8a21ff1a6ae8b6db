"""Chats as text, and the places of the answers in it."""

import pytest

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


def test_messages_are_without_the_nulls_of_a_column():
    record = {"messages": [{"role": "user", "content": "q?", "tool_calls": None}]}
    assert messages_of(record) == [{"role": "user", "content": "q?"}]
