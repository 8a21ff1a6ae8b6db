"""Rows as Parquet, and as logs of inspect_ai, which ``inspect view`` shows.

A log (https://inspect.aisi.org.uk/eval-logs.html) is what one model answered in one evaluation: each step of a run has
one.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from lockstep.errors import ConfigError, LockstepError
from lockstep.files import new_file, write_file
from lockstep.json_text import refused
from lockstep.report.jsonl import NOT_FINITE, parse_record, whole_lines
from lockstep.report.rows import COLUMNS, FIELDS, FILE_COLUMNS, HEALTH_COLUMNS, PART_COLUMNS, SAMPLE_COLUMNS, TURNS

_ROWS = 4096  # rows that are in memory at a time
_TEXTS = ("prompt", "generated_text", *PART_COLUMNS, "answer", "health")
"""Columns that are texts, also where every text of a model's happens to be NaN."""
_FIELD = f"{FIELDS}."  # the beginning of the names of columns of further fields
TEXTS, NUMBERS = frozenset(("text", "not finite")), frozenset(("int", "float", "not finite"))
"""Kinds of values that a column may have together."""


def check_pyarrow() -> None:
    """Check before hours of work that Parquet can be written."""
    _pyarrow()


def write_parquet(lines: Path, output: Path | None = None) -> Path:
    """Write the rows of a file of JSON lines as Parquet, which appears under its name only when it is complete.

    A column is there if any row has it; a row without it has none there. Numbers of which one is a float are floats.
    Each further field of prompts is a column ``fields.NAME``; objects, values of several kinds, and the turns of a
    conversation are texts of JSON.

    Args:
        output: The Parquet file; None: beside the lines, with the suffix ``.parquet``.

    Raises:
        ConfigError: pyarrow is not installed.
        LockstepError: The file has no row, or a column that is a text in one row and something else in another.
    """
    pa, pq = _pyarrow()
    path = lines.with_suffix(".parquet") if output is None else output
    types = {"text": pa.string(), "float": pa.float64(), "int": pa.int64(), "bool": pa.bool_()}
    types["json"] = pa.string()
    types |= {f"list of {kind}": pa.list_(types[kind]) for kind in ("text", "float", "int")}
    with new_file(path) as file, refused(f"{lines} as Parquet", "Correct the rows.", LockstepError):
        kinds = _columns(lines)
        schema = pa.schema([(_text(name), types[kind]) for name, kind in kinds.items()])
        with pq.ParquetWriter(file, schema) as writer:
            rows = _rows(lines)
            while batch := [*itertools.islice(rows, _ROWS)]:
                typed = [{_text(name): _as(value, kinds[name]) for name, value in row.items()} for row in batch]
                writer.write_table(pa.Table.from_pylist(typed, schema=schema))
    return path


def _rows(lines: Path) -> Iterator[dict[str, Any]]:
    with open(lines, "rb") as file:
        for number, line in whole_lines(file):
            row = parse_record(line, f"{lines}:{number}")
            fields = row.pop(FIELDS, None) or {}
            yield row | {f"{_FIELD}{name}": value for name, value in fields.items()}


def _columns(lines: Path) -> dict[str, str]:
    """The columns in order of first appearance, and what is in each."""
    kinds_by_column: dict[str, set[str]] = {}
    for row in _rows(lines):
        for name, value in row.items():
            kinds_by_column.setdefault(name, set()).add(_kind(value))
    if not kinds_by_column:
        raise LockstepError(f"{lines} has no row. Give a file with some.")
    return {name: _one_kind(lines, name, kinds) for name, kinds in kinds_by_column.items()}


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(2**63) <= value < 2**63 else "float"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "not finite" if value in NOT_FINITE else "text"
    if isinstance(value, list):
        inside = {_kind(item) for item in value} - {"none"}
        if len(inside) < 2:
            return "none" if not inside else f"list of {inside.pop()}"
        return f"list of {'text' if inside == TEXTS else 'float' if inside <= NUMBERS else 'several kinds'}"
    return type(value).__name__


def _one_kind(lines: Path, name: str, kinds: set[str]) -> str:
    kinds = kinds - {"none"}
    if name in _TEXTS and kinds <= TEXTS:
        return "text"
    if not kinds or kinds <= NUMBERS:
        # What has no value in any row is a metric, and metrics are numbers; so is what is nowhere finite.
        return "int" if kinds == {"int"} else "float"
    if kinds <= TEXTS:
        return "text"
    if kinds == {"bool"}:
        return "bool"
    inside = {kind.removeprefix("list of ") for kind in kinds if kind.startswith("list of ")}
    if len(inside) == len(kinds) and (inside <= NUMBERS or inside <= TEXTS):
        # A list in which every text is the name of a number may be one of texts.
        return "list of text" if "text" in inside else "list of int" if inside == {"int"} else "list of float"
    if name.startswith(_FIELD) or name == TURNS:
        return "json"  # objects, and values of several kinds
    raise LockstepError(f"{lines}: the column {name!r} has values of several kinds: {', '.join(sorted(kinds))}.")


def _as(value: Any, kind: str) -> Any:
    """A value as its column has it; an empty list is no value where the column has no list with anything in it."""
    if kind == "json":
        return None if value is None else json.dumps(value)
    _, is_list, inner = kind.rpartition("list of ")
    if isinstance(value, list):
        return [_as(item, inner) for item in value] if is_list else None
    return float(value) if value is not None and kind == "float" else _text(value)


def _text(value: Any) -> Any:
    """A text that UTF-8 can express: half of a surrogate pair becomes a question mark."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"Parquet needs pyarrow, which cannot be imported ({error}). Install it on the leader with "
            "pip install 'jax-lockstep[parquet]', or do without Parquet (write_parquet: false)."
        ) from error
    return pyarrow, pyarrow.parquet


VERSION = 2  # the version of the log format that is written
NO_SCORES: Final = {*COLUMNS, *SAMPLE_COLUMNS, *FILE_COLUMNS, "task", "question_id", "answer", "rank"}
"""The columns of rows that are no scores."""
_METADATA: Final = ("mean_logprob", "finish_reason", "rank", *HEALTH_COLUMNS)
STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
"""Finish reasons in the words of inspect_ai; those that it has no word for are unknown."""
_MEND = "A row has step (or round), prompt_id, prompt and generated_text, and else numbers and texts. Mend the row."


def write_inspect_log(rows: Iterable[Mapping[str, Any]], directory: Path, *, run: str, created: datetime) -> list[Path]:
    """Write a log for each step (or round) and task of some rows.

    Raises:
        LockstepError: There is no row, or one has not what a log needs; nothing is written then.
    """
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for number, row in enumerate(rows, start=1):
        with refused(f"row {number} of {run} as a sample of inspect_ai", _MEND, LockstepError):
            unit = "round" if "round" in row and "step" not in row else "step"
            at = int(row.get(unit, 0))
            sample = _sample(row, f"{run}@{unit}-{at}")
            groups.setdefault((str(row.get("task", "samples")), unit, at), []).append(sample)
    if not groups:
        raise LockstepError("there are no rows to write. Give a file with some.")
    directory.mkdir(parents=True, exist_ok=True)
    return [_write(directory, run, *key, samples, created) for key, samples in groups.items()]


def _write(
    directory: Path, run: str, task: str, unit: str, step: int, samples: list[dict[str, Any]], created: datetime
) -> Path:
    when = created.astimezone(UTC).replace(microsecond=0).isoformat()
    key = hashlib.sha256(f"{run}/{task}/{step}".encode()).hexdigest()[:22]
    log = {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": key,
            "run_id": hashlib.sha256(run.encode()).hexdigest()[:22],
            "created": when,
            "task": task,
            "task_id": key,
            "dataset": {"name": task, "samples": len({sample["id"] for sample in samples})},
            "model": f"lockstep/{run}@{unit}-{step}",
            "config": {"epochs": max(sample["epoch"] for sample in samples)},
            "metadata": {unit: step, "run": run},
        },
        "results": _results(samples),
        "stats": {"started_at": when, "completed_at": when},
        "samples": samples,
    }
    path = directory / f"{when.replace(':', '-')}_{_plain(task)}_{unit}-{step:06d}.json"
    # What is no number stands as NaN or Infinity, as inspect_ai itself writes it.
    write_file(path, json.dumps(log))
    return path


def _sample(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    number = row["question_id"] if "question_id" in row else row["prompt_id"]
    reason = STOP_REASONS.get(str(row.get("finish_reason")), "unknown")
    prompt, answer, count = (
        _text(str(row["prompt"])),
        _text(str(row["generated_text"])),
        int(row.get("num_tokens") or 0),
    )
    message = {"role": "assistant", "content": answer, "source": "generate", "model": model}
    scored = {name: value for name, value in row.items() if name not in NO_SCORES and value is not None}
    texts = {name: _text(value) for name, value in scored.items() if _kind(value) == "text"}
    return {
        "id": _text(number) if isinstance(number, str) else int(number),
        "epoch": int(row.get("generation_id", 0)) + 1,
        "input": prompt,
        "target": _text(str(row.get("answer", ""))),
        "messages": [{"role": "user", "content": prompt, "source": "input"}, message],
        "output": {
            "model": model,
            "choices": [{"message": message, "stop_reason": reason}],
            "completion": answer,
            "usage": {"output_tokens": count, "total_tokens": count},
        },
        "scores": {
            name: {"value": float(value), "answer": answer} for name, value in scored.items() if name not in texts
        },
        "metadata": {name: row[name] for name in _METADATA if row.get(name) is not None} | texts,
    }


def _results(samples: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, score in sample["scores"].items():
            values.setdefault(name, []).append(score["value"])
    return {
        "total_samples": len(samples),
        "completed_samples": len(samples),
        "scores": [
            {
                "name": name,
                "scorer": name,
                "scored_samples": len(scores),
                "unscored_samples": len(samples) - len(scores),
                "metrics": {"mean": {"name": "mean", "value": sum(scores) / len(scores)}},
            }
            for name, scores in values.items()
        ],
    }


def _plain(name: str) -> str:
    """A name as a part of a file's name."""
    return "".join(character if character.isalnum() else "-" for character in name)
