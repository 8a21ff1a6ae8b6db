"""Rows as logs of inspect_ai, which ``inspect view`` shows (https://inspect.aisi.org.uk/eval-logs.html).

A log is what one model answered in one evaluation, so each step of a run is a log of its own.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.report.rows import COLUMNS, FILE_COLUMNS, SAMPLE_COLUMNS

VERSION = 2
"""The version of the log format that is written."""
OWN = {*COLUMNS, *SAMPLE_COLUMNS, *FILE_COLUMNS, "task", "question_id", "answer"}
"""The columns of rows that are no scores."""
STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
"""Finish reasons in the words of inspect_ai; those that it has no word for are unknown."""


def write_inspect_log(rows: Iterable[Mapping[str, Any]], directory: Path, *, run: str, created: datetime) -> list[Path]:
    """Write a log for each step (or round) and task of some rows.

    Args:
        rows: Rows of a training run, of its tasks, or of ``lockstep sample``, as their files have them.
        directory: Where the logs go; it is made where it is missing.
        run: The name of the run, which stands for the model.
        created: When the rows were made.

    Raises:
        LockstepError: There is no row.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        at = row["step"] if "step" in row else row.get("round", 0)
        groups.setdefault((str(row.get("task", "samples")), int(at)), []).append(row)
    if not groups:
        raise LockstepError("there are no rows to write. Give a file with some.")
    directory.mkdir(parents=True, exist_ok=True)
    return [_write(directory, run, task, step, each, created) for (task, step), each in groups.items()]


def _write(directory: Path, run: str, task: str, step: int, rows: list[Mapping[str, Any]], created: datetime) -> Path:
    when = created.astimezone(UTC).replace(microsecond=0).isoformat()
    key = hashlib.sha256(f"{run}/{task}/{step}".encode()).hexdigest()[:22]
    unit = "round" if "round" in rows[0] else "step"
    samples = [_sample(row, f"{run}@{unit}-{step}") for row in rows]
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
    draft = path.with_name(f".{path.name}.tmp")
    # What is no number stands as NaN or Infinity, as inspect_ai itself writes it.
    draft.write_text(json.dumps(log), encoding="utf-8")
    os.replace(draft, path)
    return path


def _sample(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    number = int(row["question_id"] if "question_id" in row else row["prompt_id"])
    reason = STOP_REASONS.get(str(row.get("finish_reason")), "unknown")
    said = str(row["generated_text"])
    message = {"role": "assistant", "content": said, "source": "generate", "model": model}
    return {
        "id": number,
        "epoch": int(row.get("generation_id", 0)) + 1,
        "input": str(row["prompt"]),
        "target": str(row.get("answer", "")),
        "messages": [{"role": "user", "content": str(row["prompt"]), "source": "input"}, message],
        "output": {
            "model": model,
            "choices": [{"message": message, "stop_reason": reason}],
            "completion": said,
            "usage": {"output_tokens": int(row.get("num_tokens", 0)), "total_tokens": int(row.get("num_tokens", 0))},
        },
        "scores": {
            name: {"value": float(value), "answer": said}
            for name, value in row.items()
            if name not in OWN and value is not None
        },
        "metadata": {name: row[name] for name in ("mean_logprob", "finish_reason") if name in row},
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
                "scored_samples": len(each),
                "unscored_samples": len(samples) - len(each),
                "metrics": {"mean": {"name": "mean", "value": sum(each) / len(each)}},
            }
            for name, each in values.items()
        ],
    }


def _plain(name: str) -> str:
    """A name as a part of a file's name."""
    return "".join(each if each.isalnum() else "-" for each in name)
