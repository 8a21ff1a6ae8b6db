"""Training data: files, their tokenised cache, and the rows of each step."""

from lockstep.training.data.config import DataConfig as DataConfig
from lockstep.training.data.config import GrpoDataConfig as GrpoDataConfig
from lockstep.training.data.config import LmDataConfig as LmDataConfig
from lockstep.training.data.config import PreferenceDataConfig as PreferenceDataConfig
from lockstep.training.data.examples import DataFormat as DataFormat
from lockstep.training.data.records import SourceConfig as SourceConfig
from lockstep.training.data.rows import CachedRows as CachedRows
from lockstep.training.data.token_cache import TokenCache as TokenCache
