"""The files of a run, and their rows, checked: of training, of ``lockstep sample``, or written by another program."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from lockstep.errors import ConfigError, LockstepError
from lockstep.report.alarm_log import HEALTH_FILE
from lockstep.report.jsonl import as_float, numbered_records
from lockstep.report.rows import FIELDS, FILE_COLUMNS, HEALTH_COLUMNS, TOKEN_COLUMNS, TURNS, Row
from lockstep.report.turns import Turn, conversation_text

ROWS: Final = (
    "samples.jsonl",
    "samples/samples.jsonl",
    "samples/samples-host-*.jsonl",
    "samples-host-*.jsonl",
)
"""Patterns of files of samples below a run's directory: the first that is there counts."""
ROLLOUTS: Final = "rollouts.jsonl"  # the file of the best and worst answers of each rollout
METRICS: Final = "metrics*.jsonl"
TRACES: Final = "profiler/plugins/profile"  # the directory of a run's profiler traces, each named by its steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run that a reader opens."""

    name: str
    directory: Path
    rows: tuple[Path, ...]  # the files of samples; several where hosts write their own
    rollouts: tuple[Path, ...]  # the file of answers of rollouts, where there is one
    metrics: tuple[Path, ...]
    health: tuple[Path, ...] = ()  # the file of the health of rounds, where there is one

    def traces(self) -> list[tuple[int, int, list[int]]]:
        """First and last step of each profiler trace in the directory, and the processes that have traced them."""
        traces = []
        for trace in (self.directory / TRACES).glob("steps-*-*"):
            first, _, last = trace.name.removeprefix("steps-").partition("-")
            processes = [path.name.partition(".")[0].partition("-")[2] for path in trace.glob("process-*.xplane.pb")]
            if first.isdecimal() and last.isdecimal() and all(map(str.isdecimal, processes)):
                traces.append((int(first), int(last), sorted(map(int, processes))))
        return sorted(traces)

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        """Name, inode, size and time of change of each file: another value when one is written or replaced."""
        stamps = []
        for path in (*self.rows, *self.rollouts, *self.metrics, *self.health):
            try:
                stat = path.stat()
            except FileNotFoundError:  # being replaced
                continue
            stamps.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(stamps)


def find_run(place: str | os.PathLike[str]) -> RunFiles:
    """Find the files of a run, which need not have been written yet.

    Args:
        given: The directory of a run, or a file of rows. The metrics of a file's run are looked for beside it.

    Raises:
        ConfigError: There is no such file or directory, or it is behind a URL.
    """
    text = os.fspath(place)
    if "://" in text:
        raise ConfigError(f"{text} is a URL; only local files are read. Copy the run's files here first.")
    path = Path(text)
    if path.is_dir():
        return _files(path.resolve().name, path, _rows(path))
    if not path.exists():
        raise ConfigError(
            f"{text} does not exist. Name the directory of a run (trainer.log_dir/trainer.run_id, such as "
            f"runs/my-run) or a file of its rows.{_nearby(path.parent)}"
        )
    if not path.is_file():
        raise ConfigError(f"{text} is a pipe or a device, and is read more than once. Write its rows to a file first.")
    directory = path.resolve().parent
    alone = [file.name for file in _rows(directory)] == [path.name]  # the file is all that a report of the run has
    return _files(directory.name if alone else f"{directory.name}/{path.stem}", path.parent, (path,))


def require_rows(run: RunFiles) -> None:
    """Check that a run has rows."""
    if not run.rows and not run.rollouts:
        raise ConfigError(
            f"{run.directory} has no samples.jsonl and no rollouts.jsonl. A run writes them from its first round of "
            f"samples on (inference_eval.eval_every); name its directory or its file.{_nearby(run.directory)}"
        )


def _rows(directory: Path) -> tuple[Path, ...]:
    """The files of samples of a directory, and that of its rollouts."""
    samples = next((files for pattern in ROWS if (files := sorted(directory.glob(pattern)))), [])
    return (*samples, *directory.glob(ROLLOUTS))


def _files(name: str, directory: Path, rows: tuple[Path, ...]) -> RunFiles:
    return RunFiles(
        name=name,
        directory=directory,
        rows=tuple(path for path in rows if path.name != ROLLOUTS),
        rollouts=tuple(path for path in rows if path.name == ROLLOUTS),
        metrics=_metrics(directory),
        health=tuple(directory.glob(HEALTH_FILE)),
    )


def _metrics(directory: Path) -> tuple[Path, ...]:
    return tuple(sorted(directory.glob(METRICS)))


def _nearby(directory: Path) -> str:
    """The newest run below a directory, as a sentence, or nothing."""
    if not directory.is_dir():
        return ""
    runs = [
        candidate
        for candidate in directory.iterdir()
        if candidate.is_dir() and (_rows(candidate) or _metrics(candidate))
    ]
    return f" Did you mean {max(runs, key=lambda candidate: candidate.stat().st_mtime)}?" if runs else ""


type Axis = Literal["step", "round"]
"""The column that counts up between a prompt's answers."""

OWN: Final = ("step", "round", "prompt_id", "generation_id", "prompt", "generated_text", "finish_reason")
"""The columns with a meaning of their own; the others are numbers or texts about the answer."""
TOKENS, TOKEN_LOGPROBS = TOKEN_COLUMNS
HEALTH, LOOP_FROM = HEALTH_COLUMNS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRow:
    """One answer of a file.

    Args:
        tokens: Each token's text and natural-log probability; empty where the file does not have them.
        health: The states of the answer, with a space between two; empty where nothing is wrong, None where the file
            does not say.
        loop_from: The index of the token with which its loop begins; None where there is none.
        turns: The messages of a conversation; empty where the model answered once.
    """

    axis: Axis  # whether `when` is a step or a round
    when: int  # number of training steps completed, or of the round
    prompt_id: int | str  # the prompt's number, or its name
    generation_id: int  # number of the answer among those of its prompt
    prompt: str
    generated_text: str
    finish_reason: str  # why the answer ended; empty where the file does not say
    numbers: Mapping[str, float | None]  # further columns that are numbers, by name; None where there is no value
    texts: Mapping[str, str]  # further columns that are texts, by name, and the further fields of the prompt's line
    tokens: Sequence[tuple[str, float]]
    health: str | None = None
    loop_from: int | None = None
    turns: Sequence[Turn] = ()
    rollout: bool = False  # whether it is one of the best or worst answers of a rollout

    @property
    def shown(self) -> str:
        """Text of the answer for readers: the lines of a conversation, or what the model wrote."""
        return conversation_text(self.turns) if self.turns else self.generated_text

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
            health=self.health,
            loop_from=self.loop_from,
            turns=self.turns,
        )


def read_rows(path: Path) -> list[SavedRow]:
    """Read the rows of a file that may still be written; a last line that is not whole is left out."""
    records, _ = numbered_records(path)
    rows = [parse_row(record, f"{path}:{number}") for number, record in records]
    return [dataclasses.replace(row, rollout=True) for row in rows] if path.name == ROLLOUTS else rows


def parse_row(record: Mapping[str, Any], place: str) -> SavedRow:
    """Check a record and make a row of it."""
    axis: Axis = "round" if "step" not in record and "round" in record else "step"
    numbers, texts = {}, {}
    for name, value in record.items():
        if name in (*OWN, *FILE_COLUMNS, LOOP_FROM) or (name == HEALTH and not isinstance(value, int | float)):
            continue
        if value is None or (number := as_float(value)) is not None:
            numbers[name] = None if value is None else number
        elif isinstance(value, str):
            texts[name] = value
        else:
            raise _wrong(place, name, value, "a number, a text or null")
    further = record.get(FIELDS, {})
    if not isinstance(further, Mapping):
        raise _wrong(place, FIELDS, further, "an object")
    for name, value in further.items():
        texts.setdefault(name, value if isinstance(value, str) else json.dumps(value))
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
        # A number is a metric of this name, of another program or an earlier version.
        health=None if isinstance(record.get(HEALTH), int | float | None) else _text(record, HEALTH, place),
        loop_from=None if record.get(LOOP_FROM) is None else _count(record, LOOP_FROM, place),
        turns=_turns(record, place),
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


def _turns(record: Mapping[str, Any], place: str) -> Sequence[Turn]:
    turns = record.get(TURNS, [])
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        raise _wrong(place, TURNS, turns, "a list of messages with the texts 'role' and 'content'")
    return tuple(turns)


def _is_turn(turn: Any) -> bool:
    said = isinstance(turn, dict) and (isinstance(turn.get("content"), str) or isinstance(turn.get("tool_calls"), list))
    texts = said and all(isinstance(turn.get(name, ""), str) for name in ("role", "name")) and "role" in turn
    return texts and (turn.get("reward") is None or _is_number(turn["reward"]))


def _tokens(record: Mapping[str, Any], place: str) -> list[tuple[str, float]]:
    if TOKENS not in record and TOKEN_LOGPROBS not in record:
        return []
    texts, logprobs = (_found(record, name, place) for name in (TOKENS, TOKEN_LOGPROBS))
    if not isinstance(texts, list) or not all(isinstance(value, str) for value in texts):
        raise _wrong(place, TOKENS, texts, "a list of texts, one per token")
    if not isinstance(logprobs, list) or not all(_is_number(value) for value in logprobs):
        raise _wrong(place, TOKEN_LOGPROBS, logprobs, "a list of numbers, one per token")
    if len(texts) != len(logprobs):
        raise LockstepError(
            f"{place}: {len(texts)} {TOKENS} and {len(logprobs)} {TOKEN_LOGPROBS}. Write one of each per token."
        )
    pairs = zip(texts, map(as_float, logprobs), strict=True)
    return [(text, number) for text, number in pairs if number is not None]


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and as_float(value) is not None


def _found(record: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in record:
        columns = ", ".join(list(record)[:12]) or "nothing"
        raise LockstepError(
            f"{place}: the column {name!r} is missing; found {columns}. A row has step (or round), prompt_id, prompt "
            "and generated_text, as samples.jsonl of a run; metrics are another file."
        )
    return record[name]


def _wrong(place: str, name: str, value: Any, expected: str) -> LockstepError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return LockstepError(f"{place}: the column {name!r} is {shown}; {expected} was expected. Mend or remove the line.")
