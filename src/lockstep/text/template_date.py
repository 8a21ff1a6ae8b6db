"""The date in a chat template, fixed for a run: today's, which templates ask for, differs by day and by zone."""

import datetime
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigError
from lockstep.printable import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

TEMPLATE_DATE: Final = "date of the chat template"  # the name of that fact in what a run keeps
_FUNCTION: Final = "strftime_now"  # the function of transformers that a template calls: Llama 3.2, SmolLM3, gpt-oss
# Newer transformers (5.24) gives a template data alone, so the function is one of Jinja's. `trim_blocks` removes the
# end of its last line: what follows begins a line, as it does alone.
_MACRO: Final = """{%- macro strftime_now(format) -%}
{%- set text = namespace(dated=format) -%}
{%- for directive, value in lockstep_date.items() -%}
{%- set text.dated = text.dated.replace(directive, value) -%}
{%- endfor -%}
{{- text.dated -}}
{%- endmacro %}
"""
_DIRECTIVES: Final = "aAbBcdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ"
_FIRST_CALL: Final = "lockstep_first_date"  # the attribute of one that a program has loaded itself
_ATTRIBUTE: Final = "lockstep_template_date"  # the attribute of a tokenizer that has its date


def fix_template_date(
    tokenizer: "PreTrainedTokenizerBase",
    kept: Callable[[], str | None],
    broadcast: Callable[[str, Callable[[], bytes]], bytes],
) -> str:
    """Have the chat template of a tokenizer see one date in every start of a run and on every host.

    Args:
        kept: A function that returns the date that an earlier start of the run kept; None for a new run, which has
            today's by the leader's clock. It is called on the leader, and where the template has a date.
        broadcast: ``Hosts.broadcast_from_leader``.

    Returns:
        The date, such as ``2026-11-28``; empty where the template has none.

    Raises:
        PeerError: What was kept cannot be read, or is no date.
    """

    def choose() -> bytes:
        if _FUNCTION not in str(tokenizer.chat_template):
            return b""
        text = kept()
        try:
            date = datetime.date.today() if text is None else datetime.date.fromisoformat(text)
        except ValueError as error:
            raise ConfigError(
                f"the run kept {text!r} as the date of its chat template ({error}). Start a new run."
            ) from None
        log.info(
            "the chat template has the date %s (%s), in every later start of this run too",
            date,
            "today" if text is None else "of the first start",
        )
        return date.isoformat().encode()

    date = broadcast(TEMPLATE_DATE, choose).decode()
    if date:
        vars(tokenizer)[_ATTRIBUTE] = datetime.date.fromisoformat(date)
    return date


def template_date(tokenizer: Any) -> str:
    """The date that `fix_template_date` has fixed; empty where none is."""
    date = getattr(tokenizer, _ATTRIBUTE, None)
    return date.isoformat() if date else ""


def date_seen(tokenizer: Any) -> str:
    """The date that the chat template sees; empty where it has none.

    Where `fix_template_date` has fixed none, as in a program that has loaded the tokenizer itself, it is that of the
    first call, and a warning says so.
    """
    if _FUNCTION not in str(tokenizer.chat_template):
        return ""
    date = getattr(tokenizer, _ATTRIBUTE, None) or getattr(tokenizer, _FIRST_CALL, None)
    if date is None:
        date = vars(tokenizer)[_FIRST_CALL] = datetime.date.today()
        log.warning(
            "the chat template has today's date, %s by the clock of this process, and keeps it until the process ends; "
            "a later start, or a host in another zone, may have another. A date that all have is set by "
            "lockstep.text.fix_template_date",
            date,
        )
    return str(date.isoformat())


def date_options(tokenizer: Any) -> Mapping[str, Any]:
    """Options of `apply_chat_template` with which the chat template sees `date_seen`."""
    if not (seen := date_seen(tokenizer)):
        return {}
    date = datetime.date.fromisoformat(seen)
    values = {
        f"%{flag}{directive}": date.strftime(f"%{flag}{directive}") for flag in ("", "-") for directive in _DIRECTIVES
    }
    return {"chat_template": _MACRO + tokenizer.get_chat_template(), "lockstep_date": values}
