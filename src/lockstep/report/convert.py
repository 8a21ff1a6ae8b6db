"""``lockstep convert``: the rows of a run as Parquet or as logs of inspect_ai."""

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError
from lockstep.report.jsonl import read_jsonl
from lockstep.report.row_formats import write_inspect_log, write_parquet

ROW_FILES = ("samples.jsonl", "tasks.jsonl", "samples/samples.jsonl")
"""The files of rows that a run directory may have: of training, of tasks, of ``lockstep sample``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Settings of ``convert``."""

    run: FilePath
    """A run directory, or a file of rows (.jsonl)."""
    format: Literal["parquet", "inspect"]
    """``parquet`` (needs pyarrow), or ``inspect``: logs of inspect_ai."""
    output: FilePath | None = None
    """The directory for what is written; null: beside the rows, logs in a directory ``inspect`` there."""

    def __post_init__(self) -> None:
        check_fields(self)


def convert(config: ConvertConfig) -> list[Path]:
    """Convert the rows of a run."""
    run = Path(config.run)
    files = [run] if run.is_file() else [path for name in ROW_FILES if (path := run / name).is_file()]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise ConfigError(
            f"run is {config.run!r}, which is no file of rows and has none of {', '.join(ROW_FILES)} with rows in it. "
            "Give a run directory of ours, or such a file."
        )
    written: list[Path] = []
    for path in files:
        output = path.parent if config.output is None else Path(config.output)
        output.mkdir(parents=True, exist_ok=True)
        if config.format == "parquet":
            table = output / f"{path.stem}.parquet"
            if table in written:  # of training; the other one keeps the directory that it has in the run
                table = output / path.parent.name / table.name
                table.parent.mkdir(exist_ok=True)
            written.append(write_parquet(path, table))
            continue
        name = (path.parent if path.parent.name != "samples" else path.parent.parent).resolve().name
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        logs = output / "inspect" if config.output is None else output
        written += write_inspect_log(read_jsonl(path), logs, run=name, created=made)
    return written
