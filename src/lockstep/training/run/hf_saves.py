"""Saving the model of a run as a Hugging Face checkpoint, while it trains and at its end."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import PeerError
from lockstep.hosts import Hosts
from lockstep.models import save_hf
from lockstep.printable import get_logger
from lockstep.training.loop.hooks import StepInfo
from lockstep.training.run.config import TrainConfig
from lockstep.training.run.run_dir import check_save_paths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)


class HfSaves:
    """Saves the model of a run, or its average; a hook of its trainer. Every host makes the same calls.

    A save that fails while training goes on is logged and counted. When the job is asked to end, a save that is under
    way is given up, because the checkpoint that a resume begins at needs the time; the resumed run then makes it.
    """

    name = "hf_saves"

    def __init__(
        self, config: TrainConfig, run_dir: Path, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, hosts: Hosts
    ) -> None:
        self._config, self._run_dir, self._tokenizer, self._vocab_size = config, run_dir, tokenizer, vocab_size
        self._hosts, self._dtype = hosts, config.hf_save_dtype
        if self._dtype is None and config.lora is None:  # an average has a type of its own; adapters have their base's
            self._dtype = config.trainer.precision.param.name
        self.errors = 0  # saves that failed while training went on
        self.interrupted = False
        """Whether the last save was given up because the job is asked to end; the same on every host."""

    def check(self, checkpoints: str | None) -> None:
        """Find out on this process whether the models can be saved, see `check_save_paths`."""
        config, every = self._config, self._config.hf_save_steps
        if config.hf_save_path is None:
            return
        steps = () if every is None else range(every, config.trainer.num_train_steps, every)
        taken = {"initialize_from_hf": config.initialize_from_hf, "tokenizer": config.tokenizer}
        taken |= {"the run directory": str(self._run_dir), "that of the checkpoints": checkpoints}
        check_save_paths([*map(self._path, steps), self._path(None)], taken)

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        """Save the model after a step; the last one is saved by `save_last`."""
        self.interrupted = False
        if force or info.step < 0 or info.next_step >= self._config.trainer.num_train_steps:
            return
        start = time.monotonic()
        path = self._path(info.next_step)
        try:
            self.interrupted = not self._save(info.eval_model, path, interrupted=self._hosts.preemption.requested)
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
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            hosts=self._hosts,
            **options,
        )

    def _path(self, step: int | None) -> str:
        assert self._config.hf_save_path is not None
        name = self._config.hf_save_path.rstrip("/") + ("" if step is None else f"-step-{step}")
        return name if "://" in name else str(self._run_dir / name)
