"""Hugging Face checkpoints of a run: every so many steps, and the last model."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.credentials import get_logger
from lockstep.errors import PeerError
from lockstep.hosts import Hosts
from lockstep.models import save_hf
from lockstep.training.loop.hooks import StepInfo
from lockstep.training.run.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)


class HfSaves:
    """Saves the model of a run; a hook of its trainer. Every host makes the same calls.

    A save that fails while training goes on is logged and counted. When the job is asked to end, a save that is under
    way is given up, because the checkpoint that a resume begins at needs the time; the resumed run then makes it.
    """

    name = "hf_saves"

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int,
        hosts: Hosts,
    ) -> None:
        self._config, self._run_dir, self._tokenizer, self._vocab_size = config, run_dir, tokenizer, vocab_size
        self._hosts = hosts
        self.errors = 0
        """Saves that failed while training went on."""
        self.interrupted = False
        """Whether the last save was given up because the job is asked to end; the same on every host."""

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        """Save the model after a step; the last one is saved by `save_last`.

        Args:
            force: Whether training has ended.
        """
        self.interrupted = False
        if force or info.step < 0 or info.next_step >= self._config.trainer.num_train_steps:
            return
        start = time.monotonic()
        path = self._path(info.next_step)
        try:
            self.interrupted = not self._save(info.model, path, interrupted=self._hosts.preemption.requested)
        except PeerError as error:
            self.errors += 1
            if self._hosts.is_leader:
                log.error("the model of step %d was not saved, training goes on: %s", info.next_step, error)
            return
        if self._hosts.is_leader and not self.interrupted:
            log.info("model saved as %s in %.1f s", path, time.monotonic() - start)

    def save_last(self, model: Any, step: int | None) -> str:
        """Save the last model.

        Args:
            step: The number of completed steps where a signal ended the run; None for a full run.

        Returns:
            The directory or URL.

        Raises:
            PeerError: A host could not write.
        """
        path = self._path(step)
        self._save(model, path)
        return path

    def _save(self, model: Any, path: str, **options: Any) -> bool:
        return save_hf(
            model,
            path,
            tokenizer=self._tokenizer,
            dtype=self._config.hf_save_dtype,
            vocab_size=self._vocab_size,
            hosts=self._hosts,
            **options,
        )

    def _path(self, step: int | None) -> str:
        given = self._config.hf_save_path
        assert given is not None
        name = given.rstrip("/") + ("" if step is None else f"-step-{step}")
        return name if "://" in name else str(self._run_dir / name)
