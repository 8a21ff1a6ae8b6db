"""Training: configuration, data, objectives, and the loop."""

from lockstep.training.checkpointer_config import CheckpointerConfig, KeepConfig
from lockstep.training.config import TrainerConfig
from lockstep.training.data import DataConfig, GrpoDataConfig, LmDataConfig, PreferenceDataConfig
from lockstep.training.hooks import Hook, StepInfo
from lockstep.training.objectives import GrpoConfig, LossFn, LossParts, SimpoConfig, lm_loss
from lockstep.training.optimizer import OptimizerConfig
from lockstep.training.precision import Precision, parse_precision
from lockstep.training.rollout import RolloutConfig
from lockstep.training.rows import Batches, TokenizedRows
from lockstep.training.step import TrainState, TrainStep, batch_structs, parameter_shardings, state_structs
from lockstep.training.stopping import StopRequest
from lockstep.training.trainer import Trainer, TrainResult

__all__ = [
    "Batches",
    "CheckpointerConfig",
    "DataConfig",
    "GrpoConfig",
    "GrpoDataConfig",
    "Hook",
    "KeepConfig",
    "LmDataConfig",
    "LossFn",
    "LossParts",
    "OptimizerConfig",
    "Precision",
    "PreferenceDataConfig",
    "RolloutConfig",
    "SimpoConfig",
    "StepInfo",
    "StopRequest",
    "TokenizedRows",
    "TrainResult",
    "TrainState",
    "TrainStep",
    "Trainer",
    "TrainerConfig",
    "batch_structs",
    "lm_loss",
    "parameter_shardings",
    "parse_precision",
    "state_structs",
]
