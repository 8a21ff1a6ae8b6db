"""Training runs: the configuration of each kind, and the steps from it to a trained model."""

from lockstep.training.run.config import TrainConfig as TrainConfig
from lockstep.training.run.config import TrainLmConfig as TrainLmConfig
from lockstep.training.run.config import TrainPreferenceConfig as TrainPreferenceConfig
from lockstep.training.run.config import TrainSimpoConfig as TrainSimpoConfig
from lockstep.training.run.grpo import TrainGrpoConfig as TrainGrpoConfig
from lockstep.training.run.run import train as train
