"""Calls of a tokenizer. It may be somebody else's: its library panics, and its chat template may never end."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import PromptError
from lockstep.text.template_date import date_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_S: Final = 10.0  # seconds that a chat template may take


class _OverTime(BaseException):
    """Raised in a template, which must not catch it."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of the tokenizers' Rust, which is no `Exception` and would end the process, as an error of ours.

    Raises:
        PromptError: The library has panicked, as on a text that its pattern takes too long for.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise PromptError(
            f"the tokenizer's library gave up ({str(error).strip()[:200]}), as it does on a very long run of spaces or "
            "of one character. Correct the text, or remove it."
        ) from None


def token_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], **options: Any) -> Any:
    """The encoding of texts, as the tokenizer returns it: ``input_ids`` and what the options ask for.

    Raises:
        PromptError: The tokenizer cannot take a text.
    """
    with panics_as_errors():
        return tokenizer(list(texts), verbose=False, **options)


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text.

    Raises:
        PromptError: The tokenizer cannot take it.
    """
    with panics_as_errors():
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


def chat_text(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text that the tokenizer's chat template makes of messages.

    Raises:
        PromptError: The template has not ended after `TEMPLATE_S` seconds.
        Exception: Whatever the template raises, which is a program of the tokenizer's.
    """
    try:
        with _time_limit(TEMPLATE_S), panics_as_errors():
            options |= date_options(tokenizer)
            text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options)
    except _OverTime:
        raise PromptError(
            f"the tokenizer's chat template has not ended after {TEMPLATE_S:g} s. Use a tokenizer with another one."
        ) from None
    assert isinstance(text, str)
    return text


def count_appended(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return how many special tokens a tokenizer puts behind a text, such as the end of the sequence."""
    text, whole = (encode_text(tokenizer, "a", add_special_tokens=special) for special in (False, True))
    ends = [end for end in range(len(text), len(whole) + 1) if text and whole[end - len(text) : end] == text]
    return len(whole) - ends[-1] if ends else 0


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise in this thread when the block takes longer: between two instructions of Python, as templates are."""
    lock, ended, late = threading.Lock(), False, False
    caller = ctypes.c_ulong(threading.get_ident())

    def interrupt() -> None:
        nonlocal late
        with lock:
            if not ended:
                late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(caller, ctypes.py_object(_OverTime))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            ended = True
        if late:
            time.sleep(0.1)  # it is raised here at the latest, and not in what comes after the block
            raise _OverTime
