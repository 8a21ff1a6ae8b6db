"""A checkpoint onto the devices, each host reading its own part, with progress."""

import logging
import threading
import time
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from lockstep.engine.sizing import bytes_text
from lockstep.hosts import Hosts, settled
from lockstep.models import LlamaLMHeadModel, load_hf, read_hf_config
from lockstep.sampler.source import stored_dtype

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
    hosts.phase("loading the checkpoint")
    progress = LoadProgress(tell=hosts.is_leader)
    model: Any = None
    with settled(hosts, "load checkpoint"):
        stored = dtype or stored_dtype(read_hf_config(checkpoint))
        model = load_hf(checkpoint, mesh, dtype=jnp.dtype(stored), on_read=progress)
    return model, progress.bytes, time.monotonic() - start
