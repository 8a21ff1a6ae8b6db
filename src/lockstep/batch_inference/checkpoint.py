"""Where the weights come from: a Hugging Face checkpoint, or what a training run of ours left."""

import hashlib
import json
import logging
import os
import threading
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
from lockstep.units import bytes_text

_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 64 << 10


def resolve_checkpoint(config: SampleConfig) -> str:
    """The directory or URL of the Hugging Face files that a configuration means; host-only.

    Raises:
        ConfigError: there is no such checkpoint, or one that cannot be read yet.
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
    found = _below(Path(path)) or [each for run in Path(path).iterdir() if run.is_dir() for each in _below(run)]
    if not found:
        raise ConfigError(
            f"checkpoint_path is {path!r}, which holds no checkpoint in the Hugging Face format: no config.json there, "
            "one directory below or two. Checkpoints for resuming a training run cannot be sampled from yet: train "
            "with hf_save_path (for instance hf_save_path: checkpoint) and give the run directory. `make demo` does so."
        )
    return str(max(found, key=lambda each: (each / "config.json").stat().st_mtime))


def fingerprint(checkpoint: str) -> str:
    """What tells a checkpoint from another one: names, sizes and pieces of its files, not their age or place.

    Of each file of weights, the beginning (with the names and shapes of the tensors) and pieces of 64 KiB all over it
    are read, so that it takes seconds for a checkpoint of any size. Training changes all weights, so any piece tells.

    Args:
        checkpoint: directory or URL.

    Raises:
        ConfigError: there is nothing to read.
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
        starts = sorted({size * piece // _SAMPLES_PER_FILE for piece in range(_SAMPLES_PER_FILE)})
        with filesystem.open(file, "rb") as opened:
            for start in starts:
                opened.seek(start)
                total.update(opened.read(_SAMPLE_BYTES))
    return total.hexdigest()


def stored_dtype(hf: Mapping[str, Any]) -> str:
    """The floating type in which a checkpoint's ``config.json`` says that it is stored."""
    named = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    return named if named in ("float32", "bfloat16", "float16") else "float32"


def _below(run: Path) -> list[Path]:
    """Directories inside a run directory that are checkpoints in the Hugging Face format."""
    return [each.parent for each in run.glob("*/config.json") if _is_model(each)]


def _is_model(config: Path) -> bool:
    try:
        return "architectures" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


log = logging.getLogger(__name__)

_TELL_S = 5.0
"""Seconds between two lines about loading."""


class LoadProgress:
    """Counts bytes as they are read; the leader logs how it goes.

    Args:
        tell: whether to log.
    """

    def __init__(self, tell: bool) -> None:
        self.bytes = 0
        self._tell, self._lock = tell, threading.Lock()
        self._start = self._last = time.monotonic()

    def __call__(self, read: int, total: int) -> None:
        """``read`` more bytes, of ``total`` that this host will read."""
        with self._lock:
            self.bytes += read
            now = time.monotonic()
            if self._tell and (now - self._last >= _TELL_S or self.bytes >= total):
                self._last = now
                rate = bytes_text(round(self.bytes / max(now - self._start, 1e-9)))
                log.info("loading: %s of %s on this host, %s/s", bytes_text(self.bytes), bytes_text(total), rate)


def load(hosts: Hosts, checkpoint: str, mesh: Mesh, dtype: str | None) -> tuple[LlamaLMHeadModel, int, float]:
    """The model on a mesh.

    Args:
        hosts: of the job; every host calls it alike.
        checkpoint: directory or URL of Hugging Face files.
        mesh: of all devices, or of this host's.
        dtype: of the weights; None: as they are stored.

    Returns:
        The model, bytes that this host read, seconds until the last host had its part.

    Raises:
        PeerError: a host could not read its part; the same on every host.
    """
    start = time.monotonic()
    progress = LoadProgress(tell=hosts.is_leader)
    model: Any = None
    with hosts.run_on_all("loading the checkpoint"):
        stored = dtype or stored_dtype(read_hf_config(checkpoint))
        model = load_hf(checkpoint, mesh, dtype=jnp.dtype(stored), on_read=progress)
    return model, progress.bytes, time.monotonic() - start
