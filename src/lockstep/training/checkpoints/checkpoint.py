"""Training checkpoints on a disk or in a bucket: their directories and metadata, and the newest whole one of a run."""

import dataclasses
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree
from safetensors import SafetensorError

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.json_text import parse_json, refused, typed
from lockstep.limits import FILE_BYTES, HOOK_BYTES, check_size, read_small
from lockstep.printable import get_logger
from lockstep.storage import call_remote
from lockstep.urls import check_bare_name, checkpoint_path

if TYPE_CHECKING:
    from etils import epath

log = get_logger(__name__)

METADATA = "metadata.json"  # the file that makes a directory a checkpoint; it is written last

FORMAT = 3  # the version of the layout of a checkpoint; 2 had arrays of hooks as base64, which no hook reads any more


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
    hooks: Mapping[str, Any]  # the states of the hooks by their names; as read, with names in place of arrays
    hooks_called: bool  # whether the hooks had been called for this step
    model: Mapping[str, Any] | None = None  # the result of `model_spec`; None where the run did not say
    hook_arrays: str | None = None  # the file of the arrays in the states of hooks; None without any
    tree_digest: str = ""  # the result of `merge_arrays`

    def to_json(self) -> str:
        """Return the metadata as JSON text, with a digest of itself."""
        return _sealed({"format": FORMAT, **dataclasses.asdict(self)})

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
            version = values.get("format")
            if values.pop("digest") is None or _sealed(values) != text:
                raise ValueError("its digest is another one")
            if values.pop("format") in (2, FORMAT):
                check_bare_name(values["arrays"], METADATA)
                if (file := values.get("hook_arrays")) is not None:
                    check_bare_name(file, METADATA)
                return typed(cls, values)
        raise ConfigError(
            f"this version of lockstep reads checkpoints of formats 2 and {FORMAT}, and this one is of format "
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
            return CheckpointMetadata.from_json(read_file(file).decode())
        except (DamagedCheckpointError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(f"{file} is damaged: {error}") from error

    def hooks(self, metadata: CheckpointMetadata) -> Mapping[str, Any]:
        """Read the states of the hooks of a checkpoint, with their arrays.

        Raises:
            DamagedCheckpointError: The file of the arrays is not as it was written, or not there.
        """
        if metadata.hook_arrays is None:
            return metadata.hooks
        file = self.of(metadata.step) / metadata.hook_arrays
        try:
            data = read_file(file, HOOK_BYTES)
            if _hooks_file(data) != metadata.hook_arrays:
                raise ValueError("its SHA-256 is not that in its name")
            states: Mapping[str, Any] = with_arrays(metadata.hooks, safetensors.numpy.load(data))
        except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
            raise DamagedCheckpointError(f"{file} is damaged: {error}") from error
        return states

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
        """Make a checkpoint of what has been written, and of the states of hooks.

        Raises:
            ConfigError: The arrays of hooks take more than is read.
        """
        arrays: dict[str, np.ndarray] = {}
        states, file = without_arrays(metadata.hooks, arrays), None
        if (size := sum(array.nbytes for array in arrays.values())) > HOOK_BYTES:
            raise ConfigError(
                f"the answers of rollouts that a checkpoint keeps take {size:,} bytes; at most {HOOK_BYTES:,} are "
                "read. Set rollout_ahead to 0, or checkpointer.every to a multiple of the updates of a rollout."
            )
        if arrays:
            data = safetensors.numpy.save(arrays)
            file = _hooks_file(data)
            self.write_whole(self.of(metadata.step) / file, data)
        written = dataclasses.replace(metadata, hooks=states, hook_arrays=file)
        self.write_whole(self.of(metadata.step) / METADATA, written.to_json().encode())

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
        ConfigError: There is no access to it.
    """
    text = os.fspath(path)
    if "\0" in text:
        return False  # no path has it
    try:
        # `stat` of a local `epath.Path` looks the owner's name up too, which not every container knows.
        call_remote("looking for", text, path.stat) if "://" in text else os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# The arrays in the states of hooks are in a file of their own: in JSON a rollout would be larger than what is read of
# metadata.
_ARRAY: Final = "array of hooks"  # the key of a dict that stands for an array, and has its name


def without_arrays(states: Any, arrays: dict[str, np.ndarray], place: str = "hooks") -> Any:
    """Return states of hooks with a name in place of each array.

    Args:
        arrays: The dict that takes the arrays, by these names.
    """
    match states:
        case np.ndarray():
            arrays[place] = states
            return {_ARRAY: place}
        case Mapping():
            return {key: without_arrays(state, arrays, f"{place}.{key}") for key, state in states.items()}
        case list() | tuple():
            return [without_arrays(state, arrays, f"{place}.{index}") for index, state in enumerate(states)]
    return states


def with_arrays(states: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return what `without_arrays` was given; a tuple is a list, as in JSON.

    Raises:
        LookupError: There is no array of a name.
    """
    match states:
        case Mapping() if _ARRAY in states:
            return arrays[states[_ARRAY]]
        case Mapping():
            return {key: with_arrays(state, arrays) for key, state in states.items()}
        case list():
            return [with_arrays(state, arrays) for state in states]
    return states


def _hooks_file(data: bytes) -> str:
    """The name of the file of hooks' arrays."""
    return f"hooks-{hashlib.sha256(data).hexdigest()}.safetensors"


def read_file(path: "epath.Path", limit: int = FILE_BYTES) -> bytes:
    """The content of a file on a disk or in a bucket, as `lockstep.limits.read_small`."""
    text = os.fspath(path)
    if "://" not in text:
        return read_small(text, limit)
    check_size(path.stat().length, text, limit)
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
