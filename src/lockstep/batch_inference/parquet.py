"""Merged rows as Parquet, where pyarrow is installed."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

_ROWS = 4096
"""Rows that are in memory at a time."""


def check_pyarrow() -> None:
    """Check before hours of generating that Parquet can be written.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    _pyarrow()


def write_parquet(merged: Path) -> Path:
    """Write the rows of a file of JSON lines as Parquet beside it.

    Args:
        merged: A file of at least one line, all with the same fields.

    Returns:
        The Parquet file; it appears under its name only when it is complete.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    pa, pq = _pyarrow()
    path = merged.with_suffix(".parquet")
    temporary = path.with_name(f".{path.name}.tmp")
    writer = None
    with open(merged, "rb") as lines:
        while rows := [json.loads(line) for line in itertools.islice(lines, _ROWS)]:
            table = pa.Table.from_pylist(rows, schema=writer and writer.schema)
            if writer is None:
                # A metric without a value so far has no type yet; metrics are numbers.
                types = [(one.name, pa.float64() if pa.types.is_null(one.type) else one.type) for one in table.schema]
                table = table.cast(pa.schema(types))
                writer = pq.ParquetWriter(temporary, table.schema)
            writer.write_table(table)
    assert writer is not None, "a job has at least one row"
    writer.close()
    os.replace(temporary, path)
    return path


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"write_parquet is true, and pyarrow cannot be imported ({error}). Install it on the leader with "
            "pip install 'jax-lockstep[parquet]', or set write_parquet to false."
        ) from error
    return pyarrow, pyarrow.parquet
