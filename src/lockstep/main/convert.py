"""``lockstep convert``: the rows of a run in a format that other tools open. One process, no device."""

import dataclasses
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.report import read_jsonl, write_inspect_log, write_parquet

FILES = ("samples.jsonl", "tasks.jsonl", "samples/samples.jsonl")
"""The files of rows that a run directory may have: of training, of tasks, of ``lockstep sample``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Settings of ``convert``.

    Raises:
        ConfigError: A value cannot work.
    """

    run: str
    """A run directory, or a file of rows (.jsonl)."""
    format: Literal["parquet", "inspect"]
    """``parquet`` (needs pyarrow), or ``inspect``: logs of inspect_ai."""
    output: str | None = None
    """The directory for what is written; null: beside the rows, logs in a directory ``inspect`` there."""

    def __post_init__(self) -> None:
        if self.format not in ("parquet", "inspect"):
            raise ConfigError(f"format is {self.format!r}; it must be parquet or inspect.")


def main(arguments: Sequence[str]) -> int:
    """Convert as the command line says.

    Raises:
        ConfigError: There are no rows, or the format needs a package that is missing.
    """
    words = name_words(arguments, ["run"], "lockstep convert RUN [--key VALUE ...]")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for path in convert(parse_arguments(ConvertConfig, words)):
        print(path)
    return 0


def convert(config: ConvertConfig) -> list[Path]:
    """Convert the rows of a run.

    Returns:
        What was written.

    Raises:
        ConfigError: There are no rows, or the format needs a package that is missing.
    """
    run = Path(config.run)
    files = [run] if run.is_file() else [path for name in FILES if (path := run / name).is_file()]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise ConfigError(
            f"run is {config.run!r}, which is no file of rows and has none of {', '.join(FILES)} with rows in it. Give "
            "a run directory of ours, or such a file."
        )
    written: list[Path] = []
    for path in files:
        output = path.parent if config.output is None else Path(config.output)
        output.mkdir(parents=True, exist_ok=True)
        if config.format == "parquet":
            written.append(write_parquet(path, output / f"{path.stem}.parquet"))
            continue
        name = (path.parent if path.parent.name != "samples" else path.parent.parent).resolve().name
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        logs = output / "inspect" if config.output is None else output
        written += write_inspect_log(read_jsonl(path), logs, run=name, created=made)
    return written
