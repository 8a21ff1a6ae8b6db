"""Training data: files, their tokenised cache, and the rows of each step."""

from lockstep.training.data.config import (
    DataConfig,
    GrpoDataConfig,
    LmDataConfig,
    PreferenceDataConfig,
    SourceConfig,
)
from lockstep.training.data.examples import DataFormat
from lockstep.training.data.rows import CachedRows
from lockstep.training.data.token_cache import TokenCache

__all__ = [
    "CachedRows",
    "DataConfig",
    "DataFormat",
    "GrpoDataConfig",
    "LmDataConfig",
    "PreferenceDataConfig",
    "SourceConfig",
    "TokenCache",
]
