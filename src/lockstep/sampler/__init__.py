"""The standalone sampler: one checkpoint, many hosts, every prompt answered exactly once."""

from lockstep.sampler.config import JobConfig as JobConfig
from lockstep.sampler.config import SampleConfig as SampleConfig
