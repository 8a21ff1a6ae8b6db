"""The manifest of a job: what decides its rows, in a file beside them, so that rows of two jobs never mix."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.batch_inference.row_files import PATTERN
from lockstep.errors import ConfigError
from lockstep.json_text import parse_json

NAME = "job.json"
"""The name of the manifest's file."""


def check_manifest(directory: Path, manifest: Mapping[str, Any], *, force: bool) -> list[str]:
    """Compare a job with the one whose rows are in a directory.

    Args:
        directory: The directory of this host's rows.
        manifest: Everything that decides what the rows are, by name.
        force: Whether to go on whatever differs.

    Returns:
        A line for each difference that was overridden by ``force``.

    Raises:
        ConfigError: The rows come from another job; the message names what differs.
    """
    path = directory / NAME
    if not path.exists():
        if not force and any(directory.glob(PATTERN)):
            raise ConfigError(
                f"{directory} has rows but no {NAME}, so it is not known which job they come from. Choose another "
                "host_data_parallel_output_dir, remove the rows, or keep them with --resume force."
            )
        return []
    fix = "Choose another trainer.run_id or host_data_parallel_output_dir, or remove the directory."
    before = parse_json(path.read_bytes(), str(path), dict, fix)
    different = [name for name in {**before, **manifest} if before.get(name) != manifest.get(name)]
    lines = [f"{name} was {_shown(before.get(name))} and is {_shown(manifest.get(name))}" for name in different]
    if lines and not force:
        raise ConfigError(
            f"{directory} has rows of a job that differs from this one: {'; '.join(lines)}. Change that back, choose "
            "another trainer.run_id or host_data_parallel_output_dir, remove the directory, or keep its rows and go "
            "on with --resume force."
        )
    return lines


def write_manifest(directory: Path, manifest: Mapping[str, Any], host: int) -> Path:
    """Write the manifest; hosts that share the directory write the same.

    Args:
        directory: The directory of this host's rows; made where it is missing.
        manifest: Everything that decides what the rows are, by name.
        host: The number of this process.

    Returns:
        The file; it appears under its name only when it is complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{NAME}.{host}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, directory / NAME)
    return directory / NAME


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:60]} … {text[-40:]}"
