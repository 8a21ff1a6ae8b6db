"""The model in a training checkpoint, read without the run that saved it: to sample from it, or to export it."""

import dataclasses
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from lockstep.config_fields import encode_config
from lockstep.errors import ConfigError
from lockstep.json_text import refused
from lockstep.models import (
    LlamaConfig,
    LlamaLMHeadModel,
    LoraConfig,
    LoraModel,
    ModelConfig,
    Read,
    ReadPair,
    SavedTensor,
    SavesTokenizer,
    fingerprint,
    merged_rows,
    skeleton,
)
from lockstep.printable import hide_credentials
from lockstep.text import ModelLimits, write_tokenizer
from lockstep.training.checkpoints.arrays import ArrayReader, read_arrays
from lockstep.training.checkpoints.checkpoint import (
    METADATA,
    CheckpointDirectory,
    CheckpointMetadata,
    changes,
    named_arrays,
    shape_texts,
)
from lockstep.training.checkpoints.config import RESUMABLE, CheckpointerConfig, resumable_base
from lockstep.training.step.train_state import parameter_shardings

if TYPE_CHECKING:
    from etils import epath

TOKENIZER = "tokenizer"  # the directory of the tokenizer, beside the checkpoints of a run

_LAST = "tokenizer_config.json"  # the file of a tokenizer that is written last


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """The description of adapters in their checkpoint, and of their base model, which is not in it."""

    lora: LoraConfig  # the adapters, with the float type of the base model
    base: str  # the directory or URL of the base model's Hugging Face checkpoint
    fingerprint: str  # the digest of that checkpoint, see `lockstep.models.fingerprint`


def model_spec(config: LlamaConfig, vocab_size: int, adapters: SavedAdapters | None = None) -> dict[str, Any]:
    """Return what a checkpoint has to say of a model, so that it can be read without the run.

    Args:
        vocab_size: The number of token ids; the embedding may have more rows.
        adapters: The adapters, where they alone are trained; None for a model that is trained as a whole.

    Returns:
        JSON values.

    Example:
        >>> lockstep.training.model_spec(small, len(tokenizer))["config"]["type"]
        'llama'
    """
    spec = {"config": encode_config(config, ModelConfig), "vocab_size": vocab_size}
    return spec if adapters is None else spec | {"adapters": hide_credentials(encode_config(adapters))}


def save_tokenizer(path: str, tokenizer: SavesTokenizer) -> None:
    """Write a tokenizer beside the checkpoints of a run, unless it is there; one process calls it.

    Args:
        path: The directory or URL of the run's checkpoints.
        tokenizer: The tokenizer of the run, which a run that goes on must have too.

    Raises:
        OSError: It cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     lockstep.training.save_tokenizer(directory, tokenizer)
    """
    directory = CheckpointDirectory(path)
    target = directory.place(TOKENIZER)
    if (target / _LAST).exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-tokenizer-") as temporary:
        write_tokenizer(tokenizer, temporary)
        files = [file for file in Path(temporary).rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file.name == _LAST):
            copy = target / file.relative_to(temporary).as_posix()
            copy.parent.mkdir(parents=True, exist_ok=True)
            directory.write_whole(copy, file.read_bytes())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The model in a training checkpoint: the average of its parameters where the optimizer kept one.

    Args:
        rows: The number of rows of the embedding, which may be more.
        dtype: The float type in which the parameters are stored; with adapters, that of the base model in training.
        adapters: The adapters, where they alone are in the checkpoint; None where the whole model is.
        base_model: The directory or URL of their base model; None for the one that the checkpoint names.
    """

    directory: CheckpointDirectory
    metadata: CheckpointMetadata
    config: LlamaConfig
    vocab_size: int
    rows: int
    dtype: str
    adapters: SavedAdapters | None = None
    base_model: str | None = None

    @property
    def path(self) -> str:
        """The directory or URL of the checkpoint."""
        return os.fspath(self.directory.of(self.metadata.step))

    @property
    def tokenizer(self) -> str:
        """The directory or URL of the tokenizer beside the checkpoint; none elsewhere: others may have named it."""
        beside = self.directory.path / TOKENIZER
        if not (beside / _LAST).exists():
            named = self.metadata.config.get("tokenizer")
            raise ConfigError(
                f"there is no tokenizer at {beside}, beside the checkpoint. Set tokenizer"
                + (f"; the run had {named!r}." if named else ".")
            )
        return os.fspath(beside)

    @property
    def described_at(self) -> str:
        """The directory or URL of the files that say where an answer ends; it may not exist."""
        return os.fspath(self.directory.path / TOKENIZER)

    def limits(self) -> ModelLimits:
        """Return what the model can take."""
        return ModelLimits(rows=self.rows, max_seq_len=self.config.max_seq_len)

    def fingerprint(self) -> str:
        """Return a digest that differs between checkpoints: each save has a name of its own in its metadata."""
        return hashlib.sha256(self.metadata.to_json().encode()).hexdigest()

    def base(self) -> str:
        """Return the directory or URL of the base model that the adapters are for, which may not be there.

        Raises:
            ConfigError: The checkpoint names one that is not beside it.
        """
        assert self.adapters is not None, "there is a base where there are adapters"
        base = self.base_model or self.adapters.base
        if self.base_model is None and not _is_beside(base, os.fspath(self.directory.path)):
            raise ConfigError(
                f"{self.path} has adapters alone, and says that their base model is {base!r}, which is not beside it. "
                f"If you trust that place, add --base_model {base}, or --base_model with the configuration file of the "
                "run (.yaml)."
            )
        return base

    def checked_base(self) -> str:
        """Return `base`, after a look at what is there.

        Raises:
            ConfigError: It is not there any more, or is another one; or the checkpoint names one that is not beside it.
        """
        base = self.base()
        assert self.adapters is not None, "base has looked"
        try:
            digest = fingerprint(base)
        except (ConfigError, OSError) as error:
            raise ConfigError(
                f"{self.path} has adapters alone, and their base model cannot be read: {error} Put the checkpoint "
                f"that the run was initialized from at {base} again."
            ) from error
        if digest != self.adapters.fingerprint:
            raise ConfigError(
                f"{self.path} has adapters for another base model than the one that is now at {base}. Put the "
                "checkpoint that the run was initialized from there again."
            )
        return base

    def skeleton(self) -> LlamaLMHeadModel:
        """Return the model with a shape struct in place of each array; with adapters, it is that of the merged one."""
        structs = skeleton(self.rows, self.config)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.dtype), structs)

    def trained(self) -> PyTree:
        """Return what is in the checkpoint, the model or its adapters, with a shape struct in place of each array."""
        if self.adapters is None:
            return self.skeleton()
        dtype = next(text for name, text in self.metadata.shapes.items() if _of_model(name)).partition("[")[0]
        shapes = self.adapters.lora.shapes(self.config)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)

    def read(self, mesh: Mesh, dtype: str, base: LlamaLMHeadModel | None = None) -> LlamaLMHeadModel | LoraModel:
        """Read the model, each process only what its devices hold. Launches nothing.

        Args:
            mesh: The mesh that the model is sharded over, as for training.
            dtype: The float type of the result; adapters keep theirs.
            base: The model that adapters are for, read from `checked_base`; None where there are none.

        Raises:
            DamagedCheckpointError: A file is not as it was written, or not there.
            ConfigError: The mesh does not divide an axis.
        """
        structs = self.trained()
        shardings = parameter_shardings(structs, mesh)
        placed = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, dtype if self.adapters is None else leaf.dtype, sharding=sharding
            ),
            structs,
            shardings,
        )
        named = {name.replace("model", self._name, 1): leaf for name, leaf in named_arrays({"model": placed}).items()}
        read = read_arrays(self._arrays, named, self.metadata.tree_digest)
        trained = jax.tree.unflatten(jax.tree.structure(structs), [read[name] for name in named])
        if self.adapters is None:
            model: LlamaLMHeadModel = trained
            return model
        assert base is not None, "adapters have a base"
        return LoraModel(base=base, adapters=trained, scale=self.adapters.lora.scale)

    @property
    def _name(self) -> str:
        """The beginning of the names of its arrays."""
        names = (re.match(r"(opt_state\.(.+\.)?average)\.", name) for name in self.metadata.shapes)
        return next((match[1] for match in names if match), "model")

    @property
    def _arrays(self) -> "epath.Path":
        return self.directory.of(self.metadata.step) / self.metadata.arrays

    def _array_reader(self) -> ArrayReader:
        return ArrayReader(self._arrays)

    def pair_reader(self) -> ReadPair:
        """Return a function that reads the factors of a layer's adapter, in float32, to this host's memory."""
        arrays = self._array_reader()

        def read_pair(name: str, place: int) -> tuple[np.ndarray, np.ndarray]:
            a, b = (arrays.read(f"{self._name}.{name}.{factor}.0", (place,)) for factor in ("a", "b"))
            return a.astype(np.float32), b.astype(np.float32)

        return read_pair

    def reader(self) -> Read:
        """Return a function that reads rows of a tensor as Hugging Face stores it, to this host's memory."""
        if self.adapters is not None:
            return merged_rows(self.checked_base(), self.dtype, self.config, self.adapters.lora, self.pair_reader())
        arrays = self._array_reader()

        def read(tensor: SavedTensor, start: int, stop: int) -> np.ndarray:
            parameter = tensor.parameter
            index: list[int | slice] = [slice(None) for _ in parameter.axes]
            index[parameter.axes.index(tensor.row_axis)] = slice(start, stop)
            layer = () if tensor.place is None else (tensor.place,)
            return tensor.to_stored(arrays.read(f"{self._name}.{parameter.path}.0", (*layer, *index)))

        return read


def saved_model(path: str, step: int | None = None, base_model: str | None = None) -> SavedModel:
    """Return the model of a training checkpoint; nothing but its metadata is read.

    Args:
        path: A run directory, the directory or URL of its checkpoints, or one of them (``step-N``).
        step: The number of completed steps; None for the newest checkpoint.
        base_model: The directory or URL of the base model of adapters; None for the one that the checkpoint names,
            which must be beside it.

    Raises:
        ConfigError: There is no such checkpoint, or it does not say what its model is.
    """
    base, own = _checkpoints(path)
    directory = CheckpointDirectory(base)
    steps = directory.steps()
    step = own if step is None else step
    if not steps or (step is not None and step not in steps):
        sought = "training checkpoint" if step is None else f"checkpoint of step {step}"
        content = f"those of steps {', '.join(map(str, steps))}" if steps else f"no step-N with {METADATA}"
        raise ConfigError(
            f"there is no {sought} in {base}: found {content}. Give a run directory, the directory or URL of its "
            "checkpoints, or one of them."
        )
    metadata = directory.metadata(steps[-1] if step is None else step)
    if metadata.model is None:
        raise ConfigError(
            f"{directory.of(metadata.step)} does not say what its model is, so only its run can read it: it was saved "
            "by a program that gave Trainer no model_spec."
        )
    adapters: SavedAdapters | None = None
    fix = "It was saved by another version of lockstep, or forged; use the version that saved it."
    with refused(f"the model that {directory.of(metadata.step)} describes", fix):
        config = _decode(ModelConfig, metadata.model["config"])
        vocab_size = rows = int(metadata.model["vocab_size"])
        if "adapters" in metadata.model:
            adapters = _decode(SavedAdapters, metadata.model["adapters"])
            kind = str(adapters.lora.base_dtype)
        else:
            kind, _, sizes = metadata.shapes["model.embed.0"].partition("[")
            rows = int(sizes.partition(",")[0])
        found_model = SavedModel(
            directory=directory,
            metadata=metadata,
            config=config,
            vocab_size=vocab_size,
            rows=rows,
            dtype=jnp.dtype(kind).name,
            adapters=adapters,
            base_model=base_model,
        )
        expected = shape_texts(named_arrays({"model": found_model.trained()}))
    if base_model is not None and adapters is None:
        raise ConfigError(f"base_model is {base_model!r}, and {found_model.path} has no adapters. Remove it.")
    wrong = changes({name: text for name, text in metadata.shapes.items() if _of_model(name)}, expected)
    if wrong:
        raise ConfigError(
            f"the arrays of {found_model.path} are not those of its model: {'; '.join(wrong[:4])}. It was saved by "
            "another version of lockstep; use that one."
        )
    return found_model


def has_checkpoint(path: str) -> bool:
    """Return whether there is a training checkpoint at a path, as `saved_model` would find it."""
    base, step = _checkpoints(path)
    steps = CheckpointDirectory(base).steps()
    return bool(steps) if step is None else step in steps


def saved_at(path: str) -> float:
    """Return when the newest training checkpoint at a path was complete, in seconds since the epoch."""
    base, step = _checkpoints(path)
    directory = CheckpointDirectory(base)
    metadata = directory.of(directory.steps()[-1] if step is None else step) / METADATA
    return float(metadata.stat().mtime)


def _decode(kind: Any, values: Any) -> Any:
    """Values as draccus reads them."""
    try:
        return draccus.decode(kind, values)
    except draccus.ParsingError as error:
        raise ValueError(str(error)) from error


def _is_beside(path: str, checkpoints: str) -> bool:
    """Whether a path or URL is below the directory that the checkpoints are in."""
    parent = os.path.dirname(checkpoints)
    return not parent.endswith(":") and os.path.normpath(path).startswith(os.path.normpath(parent) + "/")


def _of_model(name: str) -> bool:
    return name.startswith("model.")


def _checkpoints(path: str) -> tuple[str, int | None]:
    """The directory of checkpoints that a path means, and the step where it is one of them."""
    path = path.rstrip("/")
    if match := re.fullmatch(r"step-(\d+)", path.rsplit("/", 1)[-1]):
        return path.rpartition("/")[0] or ".", int(match[1])
    if "://" not in path and (base_path := resumable_base(Path(path))) is not None:
        if os.path.isabs(base_path) or "://" in base_path:
            name = Path(path).absolute().name
            raise ConfigError(
                f"{path}/{RESUMABLE} names checkpoints at {base_path!r}, which is not below {path}: whoever "
                f"wrote it would decide what is read. If you have, give the place: {base_path.rstrip('/')}/{name}."
            )
        return CheckpointerConfig(base_path=base_path).path(Path(path), Path(path).absolute().name), None
    return path, None
