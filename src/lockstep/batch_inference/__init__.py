"""The standalone sampler: one checkpoint, many hosts, every prompt answered exactly once."""

from lockstep.batch_inference.config import JobConfig as JobConfig
from lockstep.batch_inference.config import SampleConfig as SampleConfig
from lockstep.batch_inference.run import sample as sample
