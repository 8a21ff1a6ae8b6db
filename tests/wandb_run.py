"""What an offline W&B run holds, read from the file that `wandb sync` would upload."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, struct.Struct("<IHB")
_FULL, _LAST = 1, 4


def history(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, values) of every history entry of ``wandb/offline-run-…``, without W&B's own keys."""
    found = []
    for entry in _messages(run, "history"):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.item}
        found.append((entry.step.num, {k: v for k, v in items.items() if not k.startswith("_")}))
    return found


def alerts(run: Path) -> list[tuple[str, str, str]]:
    """Title, text and level of every alert."""
    return [(alert.title, alert.text, alert.level) for alert in _messages(run, "alert")]


def _messages(run: Path, kind: str) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    (file,) = run.glob("*.wandb")
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == kind:
            yield getattr(record, kind)


def tables(run: Path, name: str) -> list[dict[str, Any]]:
    """The contents of every increment of the table ``name``, as the history refers to them, in its order."""
    paths = [values[f"{name}/path"] for _, values in history(run) if f"{name}/path" in values]
    return [json.loads((run / "files" / path).read_text()) for path in paths]


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: checksum, length and kind before each part, parts never across blocks."""
    assert data[:4] == b":W&B", data[:4]
    at, whole = _FILE_HEADER, b""
    while at + _HEADER.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        whole += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""
