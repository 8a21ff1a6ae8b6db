"""Training: configuration, data, objectives, and the loop."""

from lockstep.training.checkpointer_config import CheckpointerConfig, KeepConfig
from lockstep.training.config import TrainerConfig
from lockstep.training.data import (
    CachedRows,
    DataConfig,
    GrpoDataConfig,
    LmDataConfig,
    PreferenceDataConfig,
    SourceConfig,
    TokenCache,
)
from lockstep.training.hooks import Hook, StepInfo
from lockstep.training.objectives import GrpoConfig, LossFn, LossParts, SimpoConfig, lm_loss
from lockstep.training.optimizer import OptimizerConfig
from lockstep.training.precision import Precision, parse_precision
from lockstep.training.rollout import RolloutConfig
from lockstep.training.rows import Batches, TokenizedRows
from lockstep.training.step import TrainState, TrainStep, batch_structs, parameter_shardings, state_structs
from lockstep.training.stopping import StopRequest
from lockstep.training.trainer import Trainer, TrainResult
from lockstep.training.validation import Validation

__all__ = [
    "Batches",
    "CachedRows",
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
    "SourceConfig",
    "StepInfo",
    "StopRequest",
    "TokenCache",
    "TokenizedRows",
    "TrainResult",
    "TrainState",
    "TrainStep",
    "Trainer",
    "TrainerConfig",
    "Validation",
    "batch_structs",
    "lm_loss",
    "parameter_shardings",
    "parse_precision",
    "state_structs",
]
