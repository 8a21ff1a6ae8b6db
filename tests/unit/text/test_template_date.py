"""A date in a chat template, that of the run's first start; on several hosts in tests/multiprocess."""

import logging
import time

import pytest

from lockstep.errors import ConfigError
from lockstep.text import fix_template_date, tokenizer_digest
from lockstep.text.tokenize import chat_text
from tests import tiny


def test_a_date_in_the_template_is_that_of_the_run(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    messages = [{"role": "user", "content": "What is the date?"}]

    def dated(zone, kept=None):
        """A tokenizer of a start in a zone, and the date of its run."""
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        return tokenizer, fix_template_date(tokenizer, lambda: kept, lambda _, choose: choose())

    try:
        (first, date), (other, later) = dated("UTC+12"), dated("UTC-14")
        assert date != later and chat_text(first, messages) != chat_text(other, messages)
        again, same = dated("UTC-14", date)
        assert same == date and chat_text(again, messages) == chat_text(first, messages)
        assert tokenizer_digest(again) == tokenizer_digest(first) != tokenizer_digest(other)
        assert chat_text(dated("UTC", "2024-02-29")[0], messages) == "29 Feb 2024"
        with pytest.raises(ConfigError, match="the run kept '30 February' as the date of its chat template"):
            dated("UTC", "30 February")
    finally:
        monkeypatch.undo()
        time.tzset()
    lines = [
        record.getMessage() for record in caplog.records if "the chat template has the date" in record.getMessage()
    ]
    assert lines[0].startswith(f"the chat template has the date {date} (today)")
    assert lines[2].startswith(f"the chat template has the date {date} (of the first start)")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%A, %-d %B %Y (%F)') }}", "Saturday, 3 February 2024 (2024-02-03)"),
        ("\n  {% if strftime_now is defined %}\n  {{ strftime_now('%d') | int + 1 }}\n  {% endif %}\n", "\n  4\n"),
        ("{% macro day() %}{{ strftime_now('%d') }}{% endmacro %}{{ day() }}{{ messages[0].content }}", "03?"),
    ],
)
def test_a_template_sees_the_date_and_is_else_what_it_was(template, text):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    fix_template_date(tokenizer, lambda: "2024-02-03", lambda _, choose: choose())
    assert chat_text(tokenizer, [{"role": "user", "content": "?"}]) == text


def test_a_template_without_a_date_asks_nobody_for_one():
    tokenizer = tiny.tokenizer()
    before = tokenizer_digest(tokenizer)
    assert fix_template_date(tokenizer, lambda: pytest.fail("asked"), lambda _, choose: choose()) == ""
    assert tokenizer_digest(tokenizer) == before


def test_a_tokenizer_that_a_program_has_loaded_itself_keeps_the_date_of_the_first_call(monkeypatch, caplog):
    messages = [{"role": "user", "content": "What is the date?"}]

    def text(zone, tokenizer):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        return chat_text(tokenizer, messages)

    first, other = tiny.tokenizer(), tiny.tokenizer()
    first.chat_template = other.chat_template = "{{ strftime_now('%Y-%m-%d') }}"
    before = tokenizer_digest(first)
    try:
        date, later = text("UTC+12", first), text("UTC-14", other)
        assert date != later and text("UTC-14", first) == date
    finally:
        monkeypatch.undo()
        time.tzset()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(" by the clock")[0].split(", ")[1] for line in said] == [date, later]
    assert tokenizer_digest(first) == before, "hosts that load it at midnight agree"
    fix_template_date(first, lambda: "2024-02-29", lambda _, choose: choose())
    assert chat_text(first, messages) == "2024-02-29"
