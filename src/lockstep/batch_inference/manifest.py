"""What the rows in a directory come from, kept beside them, so that rows of two different jobs never mix."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.batch_inference.row_files import PATTERN
from lockstep.errors import ConfigError

NAME = "job.json"


def check_manifest(directory: Path, record: Mapping[str, Any], *, force: bool) -> list[str]:
    """Compare a job with the one whose rows are in a directory.

    Args:
        directory: of this host's rows.
        record: everything that decides what the rows are.
        force: go on whatever differs.

    Returns:
        What differs and was forced.

    Raises:
        ConfigError: the rows come from another job; says what differs.
    """
    path = directory / NAME
    if not path.exists():
        if not force and any(directory.glob(PATTERN)):
            raise ConfigError(
                f"{directory} has rows but no {NAME}, so that nobody knows what they come from. Choose another "
                "host_data_parallel_output_dir, remove the rows, or keep them with --resume force."
            )
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    different = [name for name in {**before, **record} if before.get(name) != record.get(name)]
    lines = [f"{name} was {_shown(before.get(name))} and is {_shown(record.get(name))}" for name in different]
    if lines and not force:
        raise ConfigError(
            f"{directory} has rows of a job that differs from this one: {'; '.join(lines)}. Change that back, choose "
            "another trainer.run_id or host_data_parallel_output_dir, remove the directory, or keep its rows and go "
            "on with --resume force."
        )
    return lines


def write_manifest(directory: Path, record: Mapping[str, Any], host: int) -> Path:
    """Keep what decides the rows; hosts that share the directory write the same."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{NAME}.{host}.tmp"
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, directory / NAME)
    return directory / NAME


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:60]} … {text[-40:]}"
