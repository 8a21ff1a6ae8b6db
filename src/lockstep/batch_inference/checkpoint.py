"""The checkpoint of a job: a Hugging Face one, or what a training run of lockstep saved."""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.batch_inference.config import SampleConfig
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts
from lockstep.models import LlamaLMHeadModel, load_hf, read_hf_config

_PIECES_PER_FILE = 16
_PIECE_BYTES = 64 << 10


def resolve_checkpoint(config: SampleConfig) -> str:
    """Return the directory or URL of the Hugging Face files that a configuration names; nothing is launched.

    Args:
        config: The configuration of the run. Of several checkpoints in the directory ``checkpoint_path``, the newest is
            returned.

    Raises:
        ConfigError: There is no such checkpoint, or it is one that cannot be read yet.
    """
    if config.hf_checkpoint is not None:
        return config.hf_checkpoint
    assert config.checkpoint_path is not None
    path = config.checkpoint_path
    if "://" in path or (Path(path) / "config.json").is_file():
        return path
    if not Path(path).is_dir():
        raise ConfigError(
            f"checkpoint_path is {path!r}, and there is no such directory. Give the run directory of a training run "
            "with hf_save_path, the directory of several, or the checkpoint itself. `make demo` writes one below runs."
        )
    runs = [run for run in Path(path).iterdir() if run.is_dir()]
    found = _hf_checkpoints(Path(path)) or [each for run in runs for each in _hf_checkpoints(run)]
    if not found:
        raise ConfigError(
            f"checkpoint_path is {path!r}, which has no checkpoint in the Hugging Face format: no config.json there, "
            "one directory below or two. Checkpoints for resuming a training run cannot be sampled from yet: train "
            "with hf_save_path (for instance hf_save_path: checkpoint) and give the run directory. `make demo` does so."
        )
    return str(max(found, key=lambda each: (each / "config.json").stat().st_mtime))


def fingerprint(checkpoint: str) -> str:
    """Return a digest that differs between checkpoints: of names, sizes and pieces of their files, not of age or place.

    The beginning of each file of weights (with the names and shapes of the tensors) and pieces of 64 KiB all over it
    are read, so that it takes seconds for a checkpoint of any size. Training changes all weights, so every piece
    differs.

    Args:
        checkpoint: A directory or URL of Hugging Face files.

    Returns:
        SHA-256 in hexadecimal digits.

    Raises:
        ConfigError: There is no config.json with safetensors.
    """
    filesystem, root = fsspec.core.url_to_fs(os.path.expanduser(checkpoint))
    files = sorted(f for f in filesystem.glob(f"{root.rstrip('/')}/*") if f.endswith((".safetensors", ".json")))
    total = hashlib.sha256()
    weights = [file for file in files if file.endswith(".safetensors")]
    if not weights or f"{root.rstrip('/')}/config.json" not in files:
        raise ConfigError(
            f"{checkpoint} has no config.json with safetensors beside it. Give the directory of a Hugging Face "
            "checkpoint (transformers: save_pretrained)."
        )
    for file in (f"{root.rstrip('/')}/config.json", *weights):
        size = filesystem.size(file)
        total.update(f"{file.rsplit('/', 1)[-1]} {size}\n".encode())
        starts = sorted({size * piece // _PIECES_PER_FILE for piece in range(_PIECES_PER_FILE)})
        with filesystem.open(file, "rb") as opened:
            for start in starts:
                opened.seek(start)
                total.update(opened.read(_PIECE_BYTES))
    return total.hexdigest()


def stored_dtype(hf: Mapping[str, Any]) -> str:
    """Return the name of the float type of the weights, from the contents of a checkpoint's ``config.json``."""
    named = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    return named if named in ("float32", "bfloat16", "float16") else "float32"


def _hf_checkpoints(run: Path) -> list[Path]:
    """Return the directories inside a run directory that are checkpoints in the Hugging Face format."""
    return [each.parent for each in run.glob("*/config.json") if _is_model(each)]


def _is_model(config: Path) -> bool:
    try:
        return "architectures" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def load(hosts: Hosts, checkpoint: str, mesh: Mesh, dtype: str | None) -> tuple[LlamaLMHeadModel, int, float]:
    """Load the model of a checkpoint on a mesh.

    Args:
        hosts: The processes of the job, all of which make this call.
        checkpoint: A directory or URL of Hugging Face files.
        mesh: A mesh of all devices, or of this host's.
        dtype: The float type of the weights; None for the one in which they are stored.

    Returns:
        The model, the bytes that this host read, and the seconds until the last host had its part.

    Raises:
        PeerError: A host could not read its part; raised on every host.
    """
    start = time.monotonic()
    read: list[int] = []
    with hosts.run_on_all("reading the checkpoint's config.json"):
        stored = dtype or stored_dtype(read_hf_config(checkpoint))
    model = load_hf(checkpoint, mesh, dtype=jnp.dtype(stored), on_read=lambda new, _: read.append(new), hosts=hosts)
    return model, sum(read), time.monotonic() - start
