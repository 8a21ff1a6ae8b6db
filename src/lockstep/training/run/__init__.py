"""Training runs: the configuration of each kind, and the steps from it to a trained model."""

from lockstep.training.run.config import HF_DTYPES, TrainConfig, TrainLmConfig
from lockstep.training.run.grpo import TrainGrpoConfig
from lockstep.training.run.preference import TrainPreferenceConfig, TrainSimpoConfig
from lockstep.training.run.run import train

__all__ = [
    "HF_DTYPES",
    "TrainConfig",
    "TrainGrpoConfig",
    "TrainLmConfig",
    "TrainPreferenceConfig",
    "TrainSimpoConfig",
    "train",
]
