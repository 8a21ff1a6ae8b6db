"""How a training run ended."""

import dataclasses

from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    model: PyTree
    """Parameters after the last step, in the parameter type and sharding."""
    completed_steps: int
    """Steps that were done."""
    loss: float
    """The loss of the last step; nan if there was none."""
    stopped_by: int | None
    """Signal that ended the run early, on whichever host it came; the same on all. None where there was none."""
    tracker_errors: int
    """Times the tracker failed; training went on."""
    checkpoint: str | None = None
    """The newest checkpoint of the run; None where there is none."""
    checkpoint_errors: int = 0
    """Checkpoints that could not be saved; training went on."""
    average: PyTree | None = None
    """The average of the parameters over the steps, where the optimizer keeps one (``optimizer.ema_decay``)."""
    skipped_steps: int = 0
    """Steps whose update was left out (``trainer.on_nan``)."""
    diverged: bool = False
    """Whether ``on_nan: stop`` ended the run; the model is then that before the bad step."""

    @property
    def eval_model(self) -> PyTree:
        """The model to evaluate and to export: the average where there is one, else ``model``."""
        return self.model if self.average is None else self.average
