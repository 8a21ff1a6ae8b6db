"""Training: configuration, data, objectives, and the loop."""

from lockstep.training.checkpoints.config import CheckpointerConfig, KeepConfig, resumable_base, write_resumable
from lockstep.training.checkpoints.saved_model import (
    SavedAdapters,
    SavedModel,
    has_checkpoint,
    model_spec,
    save_tokenizer,
    saved_at,
    saved_model,
)
from lockstep.training.checkpoints.search import bring_files, keep_files
from lockstep.training.data import (
    CachedRows,
    DataConfig,
    DataFormat,
    GrpoDataConfig,
    LmDataConfig,
    PreferenceDataConfig,
    SourceConfig,
    TokenCache,
)
from lockstep.training.data.rows import Batches, BatchesOfLengths, TokenizedRows
from lockstep.training.loop.batch_source import BatchFeed, BatchSource
from lockstep.training.loop.config import TrainerConfig
from lockstep.training.loop.hooks import Hook, StepInfo
from lockstep.training.loop.logprobs import ReferenceLogprobs
from lockstep.training.loop.loss_watch import LossSpikeConfig
from lockstep.training.loop.profiler import ProfilerConfig
from lockstep.training.loop.stopping import StopRequest, TrainResult
from lockstep.training.loop.trainer import Trainer
from lockstep.training.loop.validation import Validation
from lockstep.training.objectives import (
    REFERENCE,
    DpoConfig,
    GrpoConfig,
    GrpoFields,
    LossFn,
    LossParts,
    OrpoConfig,
    PairLogprobs,
    PairLosses,
    PreferenceObjective,
    SimpoConfig,
    lm_loss,
    needs_vocab_blocks,
)
from lockstep.training.rl import (
    ROLLOUTS_FILE,
    GrpoRunFields,
    Questions,
    RewardConfig,
    Rollouts,
    load_questions,
    make_rewarder,
)
from lockstep.training.rl.rollout_config import RolloutConfig
from lockstep.training.run import (
    HF_DTYPES,
    TrainConfig,
    TrainGrpoConfig,
    TrainLmConfig,
    TrainPreferenceConfig,
    TrainSimpoConfig,
    train,
)
from lockstep.training.step.optimizer import OptimizerConfig
from lockstep.training.step.precision import Precision, parse_precision
from lockstep.training.step.train_state import TrainState
from lockstep.training.step.train_step import TrainStep, batch_structs, parameter_shardings, state_structs

__all__ = [
    "BatchFeed",
    "BatchSource",
    "Batches",
    "BatchesOfLengths",
    "CachedRows",
    "CheckpointerConfig",
    "DataConfig",
    "DataFormat",
    "DpoConfig",
    "GrpoConfig",
    "GrpoDataConfig",
    "GrpoFields",
    "GrpoRunFields",
    "HF_DTYPES",
    "Hook",
    "KeepConfig",
    "LmDataConfig",
    "LossFn",
    "LossParts",
    "LossSpikeConfig",
    "OptimizerConfig",
    "OrpoConfig",
    "PairLogprobs",
    "PairLosses",
    "Precision",
    "PreferenceDataConfig",
    "PreferenceObjective",
    "ProfilerConfig",
    "Questions",
    "REFERENCE",
    "ROLLOUTS_FILE",
    "ReferenceLogprobs",
    "RewardConfig",
    "RolloutConfig",
    "Rollouts",
    "SavedAdapters",
    "SavedModel",
    "SimpoConfig",
    "SourceConfig",
    "StepInfo",
    "StopRequest",
    "TokenCache",
    "TokenizedRows",
    "TrainConfig",
    "TrainGrpoConfig",
    "TrainLmConfig",
    "TrainPreferenceConfig",
    "TrainResult",
    "TrainSimpoConfig",
    "TrainState",
    "TrainStep",
    "Trainer",
    "TrainerConfig",
    "Validation",
    "batch_structs",
    "bring_files",
    "has_checkpoint",
    "keep_files",
    "lm_loss",
    "load_questions",
    "make_rewarder",
    "model_spec",
    "needs_vocab_blocks",
    "parameter_shardings",
    "parse_precision",
    "resumable_base",
    "save_tokenizer",
    "saved_at",
    "saved_model",
    "write_resumable",
    "state_structs",
    "train",
]
