"""Training checkpoints on a disk or in a bucket: their directories and metadata, and the newest whole one of a run."""

import dataclasses
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import PyTree

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.json_text import parse_json, refused, typed
from lockstep.limits import check_size, read_small
from lockstep.printable import get_logger
from lockstep.urls import check_bare_name, checkpoint_path

if TYPE_CHECKING:
    from etils import epath

log = get_logger(__name__)

METADATA = "metadata.json"  # the file that makes a directory a checkpoint; it is written last

FORMAT = 2  # the version of the layout of a checkpoint; 1 had no checksums


class DamagedCheckpointError(ConfigError):
    """A file of a checkpoint is not as it was written, or not there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The metadata of a checkpoint, beside its arrays."""

    step: int  # the number of completed steps
    loss: float  # the loss of the last of them
    arrays: str  # the name of the directory, inside that of the checkpoint, which has the arrays
    shapes: Mapping[str, str]  # the type and the global shape of each array by its name, such as `float32[8,16]`
    facts: Mapping[str, str]  # facts that must be equal in a run that goes on from here, by name
    config: Mapping[str, Any]  # the configuration of the run
    hooks: Mapping[str, Any]  # the states of the hooks by their names
    hooks_called: bool  # whether the hooks had been called for this step
    model: Mapping[str, Any] | None = None  # the result of `model_spec`; None where the run did not say

    tree_digest: str | None = None
    """The result of `merge_arrays`; None in a checkpoint of format 1, of which nothing can be verified."""

    def to_json(self) -> str:
        """Return the metadata as JSON text, with a digest of itself."""
        values = dataclasses.asdict(self)
        if self.tree_digest is None:
            del values["tree_digest"]
            return json.dumps({"format": 1, **values}, indent=1)
        return _sealed({"format": FORMAT, **values})

    @classmethod
    def from_json(cls, text: str) -> "CheckpointMetadata":
        """Return the metadata of a JSON text.

        Raises:
            DamagedCheckpointError: The text is not as it was written, or its arrays would be elsewhere.
            ConfigError: It is of another version.
        """
        fix = "Bring the file back from a copy."
        values = parse_json(text, METADATA, dict, fix, DamagedCheckpointError)
        with refused(METADATA, fix, DamagedCheckpointError):
            sealed = values.pop("digest", None) is not None
            version = values.pop("format")
            if (not sealed and version != 1) or (sealed and _sealed({"format": version, **values}) != text):
                raise ValueError("its digest is another one")
            if version in (1, FORMAT):
                check_bare_name(values["arrays"], METADATA)
                return typed(cls, values)
        raise ConfigError(
            f"this version of lockstep reads checkpoints of formats 1 and {FORMAT}, and this one is of format "
            f"{version}. Go on with the version that wrote it, or start a new trainer.run_id."
        )


def _sealed(values: Mapping[str, Any]) -> str:
    """JSON text of values and of their digest."""
    digest = hashlib.sha256(json.dumps(values, indent=1).encode()).hexdigest()
    return json.dumps({**values, "digest": digest}, indent=1)


class CheckpointDirectory:
    """The checkpoints of a run: ``step-N/metadata.json`` beside a directory of arrays.

    A checkpoint exists once its metadata does, which is one small file that appears as a whole on a disk as in a
    bucket, so nothing has to be renamed. Each attempt to save has a directory of arrays of its own: what a process
    that was thought dead still writes is in nobody's way.

    Args:
        path: A local directory, or a URL that tensorstore and fsspec know, such as ``gs://bucket/checkpoints``.
    """

    def __init__(self, path: str) -> None:
        self._local = "://" not in path
        self.path = checkpoint_path(path)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order."""
        return sorted(step for step, directory in self._found() if is_there(directory / METADATA))

    def metadata(self, step: int) -> CheckpointMetadata:
        """Read the metadata of a checkpoint.

        Raises:
            DamagedCheckpointError: They are not as they were written.
            ConfigError: The checkpoint is of another version.
        """
        file = self.of(step) / METADATA
        try:
            metadata = CheckpointMetadata.from_json(read_file(file).decode())
        except (DamagedCheckpointError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(f"{file} is damaged: {error}") from error
        if metadata.tree_digest is None:
            log.warning("%s is of a version that stored no checksums: a damaged file would not be found", self.of(step))
        return metadata

    def of(self, step: int) -> "epath.Path":
        """Return the directory of a checkpoint, as `place` does."""
        return self.place(f"step-{step}")

    def place(self, name: str) -> "epath.Path":
        """Return the directory of a name in this one.

        Raises:
            ConfigError: It is a link: what is removed and written there would be another run's.
        """
        path = self.path / name
        if self._local and os.path.islink(path):
            raise ConfigError(f"{path} is a link, and checkpoints are removed and written there. Put a copy there.")
        return path

    def begin(self, step: int) -> str:
        """Make a directory for the arrays of a checkpoint, and return its name; nothing counts before `commit`."""
        name = f"arrays-{secrets.token_hex(4)}"
        if self._local:  # a bucket has none, and training must not wait for one that does not answer
            (self.of(step) / name).mkdir(parents=True, exist_ok=True)
        return name

    def commit(self, metadata: CheckpointMetadata) -> None:
        """Make a checkpoint of what has been written."""
        self.write_whole(self.of(metadata.step) / METADATA, metadata.to_json().encode())

    def write_whole(self, target: "epath.Path", data: bytes) -> None:
        """Write a file that appears as a whole."""
        if not self._local:
            target.write_bytes(data)  # an object appears as a whole
            return
        write_file(target, data, fsync=True)

    def remove(self, step: int) -> None:
        """Remove a checkpoint or what is there of it, its metadata first, so that no half of it ever counts."""
        (self.of(step) / METADATA).unlink(missing_ok=True)
        self.of(step).rmtree(missing_ok=True)

    def discard(self, step: int, arrays: str | None = None) -> None:
        """`remove`, where a failure is nothing but a line in the log."""
        place = self.of(step)
        try:
            self.remove(step) if arrays is None else (place / arrays).rmtree(missing_ok=True)
        except Exception as error:  # storage libraries have their own; a process that lives still may write there
            log.warning("%s cannot be removed: %s", place, error)

    def unfinished(self) -> list[int]:
        """Return the steps of directories without metadata, which interrupted saves have left."""
        complete = set(self.steps())
        return sorted(step for step, _ in self._found() if step not in complete)

    def _found(self) -> list[tuple[int, "epath.Path"]]:
        if not is_there(self.path):
            return []
        matches = [(re.fullmatch(r"step-(\d+)", entry.name), entry) for entry in self.path.iterdir()]
        return [(int(match[1]), entry) for match, entry in matches if match is not None]


def is_there(path: "epath.Path") -> bool:
    """Return whether there is a file or directory: ``exists()`` would take a stale handle for none, and it be removed.

    Raises:
        OSError: The storage does not say.
    """
    text = os.fspath(path)
    if "\0" in text:
        return False  # no path has it
    try:
        # `stat` of a local `epath.Path` looks the owner's name up too, which not every container knows.
        path.stat() if "://" in text else os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_file(path: "epath.Path") -> bytes:
    """The content of a small file on a disk or in a bucket, as `lockstep.limits.read_small`."""
    text = os.fspath(path)
    if "://" not in text:
        return read_small(text)
    check_size(path.stat().length, text)
    return path.read_bytes()


def named_arrays(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as ``model.embed.0``."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves have the same name"
    return named


def shape_texts(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return type and shape of each array as a text."""
    return {name: f"{array.dtype}[{','.join(map(str, array.shape))}]" for name, array in arrays.items()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Differences between two nested mappings, a line per value: ``key: old → new``."""
    lines = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key, "missing"), now.get(key, "missing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changes(old, new, f"{prefix}{key}.")
        elif json.dumps(old) != json.dumps(new):
            lines.append(f"{prefix}{key}: {old} → {new}")
    return lines


def keep_files(checkpoints: str, run_dir: Path, names: Iterable[str]) -> None:
    """Copy files of a run directory beside the checkpoints of the run, where they are new; one process calls it."""
    present = [name for name in names if (run_dir / name).exists()]
    if not present:
        return
    directory = CheckpointDirectory(checkpoints)
    for name in present:
        source, copy = run_dir / name, directory.path / name
        if is_there(copy) and read_file(copy) == read_small(source):
            continue
        directory.path.mkdir(parents=True, exist_ok=True)
        directory.write_whole(copy, read_small(source))


def bring_files(checkpoints: str, run_dir: Path, names: Iterable[str]) -> None:
    """Copy what `keep_files` kept into a run directory that does not have it; one process calls it."""
    for name in names:
        target, copy = run_dir / name, checkpoint_path(checkpoints) / name
        if not target.exists() and is_there(copy):
            run_dir.mkdir(parents=True, exist_ok=True)
            write_file(target, read_file(copy))
