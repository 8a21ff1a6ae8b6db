"""Rows as files have them, checked: those of a training run, of ``lockstep sample``, or written by another program."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from lockstep.errors import LockstepError
from lockstep.report.jsonl import numbered_records
from lockstep.report.rows import FILE_COLUMNS, TOKEN_COLUMNS, Row

type Axis = Literal["step", "round"]
"""What counts up between a prompt's answers."""

OWN: Final = ("step", "round", "prompt_id", "generation_id", "prompt", "generated_text", "finish_reason")
"""The columns with a meaning of their own; the others are numbers or texts about the answer."""
TOKENS, TOKEN_LOGPROBS = TOKEN_COLUMNS
_NAMED_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRow:
    """One answer of a file.

    Args:
        axis: Whether ``when`` is a step or a round.
        when: The number of training steps completed, or of the round.
        prompt_id: The prompt's number, or its name.
        generation_id: The number of the answer among those of its prompt.
        prompt: The prompt's text.
        generated_text: The answer's text.
        finish_reason: Why the answer ended; empty where the file does not say.
        numbers: Further columns that are numbers, by name; None where there is no value.
        texts: Further columns that are texts, by name.
        tokens: Each token's text and natural-log probability; empty where the file does not have them.
    """

    axis: Axis
    when: int
    prompt_id: int | str
    generation_id: int
    prompt: str
    generated_text: str
    finish_reason: str
    numbers: Mapping[str, float | None]
    texts: Mapping[str, str]
    tokens: Sequence[tuple[str, float]]

    def to_row(self) -> Row:
        """The row of a table at the terminal."""
        return Row(
            step=self.when,
            prompt_id=self.prompt_id if isinstance(self.prompt_id, int) else 0,
            generation_id=self.generation_id,
            prompt=self.prompt,
            generated_text=self.generated_text,
            num_tokens=int(self.numbers.get("num_tokens") or 0),
            finish_reason=self.finish_reason,
            mean_logprob=self.numbers.get("mean_logprob") or 0.0,
            metrics={name: value for name, value in self.numbers.items() if name not in ("num_tokens", "mean_logprob")},
        )


def read_rows(path: Path) -> list[SavedRow]:
    """Read the rows of a file that may still be written; a last line that is not whole is left out.

    Args:
        path: A local file of JSON lines.

    Returns:
        The rows, in order.

    Raises:
        LockstepError: A line cannot be read, or it is not a row; the message has file, line, what was found and the
            fix.
        OSError: The file cannot be read.
    """
    records, _ = numbered_records(path)
    return [parse_row(record, f"{path}:{number}") for number, record in records]


def parse_row(record: Mapping[str, Any], place: str) -> SavedRow:
    """Check a record and make a row of it.

    Args:
        record: The record.
        place: The file and the number of the line, for errors.

    Raises:
        LockstepError: It is not a row.
    """
    axis: Axis = "round" if "step" not in record and "round" in record else "step"
    numbers, texts = {}, {}
    for name, value in record.items():
        if name in OWN or name in FILE_COLUMNS:
            continue
        if value is None or isinstance(value, int | float):
            numbers[name] = None if value is None else _float(value)
        elif value in _NAMED_FLOATS if isinstance(value, str) else False:
            numbers[name] = _NAMED_FLOATS[value]
        elif isinstance(value, str):
            texts[name] = value
        else:
            raise _wrong(place, name, value, "a number, a text or null")
    return SavedRow(
        axis=axis,
        when=_count(record, axis, place),
        prompt_id=_prompt_id(record, place),
        generation_id=_count(record, "generation_id", place) if "generation_id" in record else 0,
        prompt=_text(record, "prompt", place),
        generated_text=_text(record, "generated_text", place),
        finish_reason=_text(record, "finish_reason", place) if record.get("finish_reason") is not None else "",
        numbers=numbers,
        texts=texts,
        tokens=_tokens(record, place),
    )


def _count(record: Mapping[str, Any], name: str, place: str) -> int:
    value = _found(record, name, place)
    # Whole numbers up to 2 ** 53 are the same in every reader of JSON.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise _wrong(place, name, value, "a whole number from 0 to 2**53")
    return value


def _prompt_id(record: Mapping[str, Any], place: str) -> int | str:
    value = _found(record, "prompt_id", place)
    return value if isinstance(value, str) else _count(record, "prompt_id", place)


def _text(record: Mapping[str, Any], name: str, place: str) -> str:
    value = _found(record, name, place)
    if not isinstance(value, str):
        raise _wrong(place, name, value, "a text")
    return value


def _tokens(record: Mapping[str, Any], place: str) -> list[tuple[str, float]]:
    if TOKENS not in record and TOKEN_LOGPROBS not in record:
        return []
    texts, logprobs = (_found(record, name, place) for name in (TOKENS, TOKEN_LOGPROBS))
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise _wrong(place, TOKENS, texts, "a list of texts, one per token")
    if not isinstance(logprobs, list) or not all(_is_number(each) for each in logprobs):
        raise _wrong(place, TOKEN_LOGPROBS, logprobs, "a list of numbers, one per token")
    if len(texts) != len(logprobs):
        raise LockstepError(
            f"{place}: {len(texts)} {TOKENS} and {len(logprobs)} {TOKEN_LOGPROBS}. Write one of each per token."
        )
    return [(text, _float(value)) for text, value in zip(texts, logprobs, strict=True)]


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, str) and value in _NAMED_FLOATS
    )


def _float(value: float | str) -> float:
    if isinstance(value, str):
        return _NAMED_FLOATS[value]
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _found(record: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in record:
        columns = ", ".join(list(record)[:12]) or "nothing"
        raise LockstepError(
            f"{place}: the column {name!r} is missing; found {columns}. A row has step (or round), prompt_id, prompt "
            "and generated_text, as samples.jsonl of a run; metrics are another file."
        )
    return record[name]


def _wrong(place: str, name: str, value: Any, wanted: str) -> LockstepError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return LockstepError(f"{place}: the column {name!r} is {shown}; {wanted} was expected. Mend or remove the line.")
