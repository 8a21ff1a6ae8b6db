"""Batch inference (`lockstep sample`): one checkpoint, many hosts, every prompt completed exactly once."""

from lockstep.batch_inference.config import JobConfig as JobConfig
from lockstep.batch_inference.config import SampleConfig as SampleConfig
from lockstep.batch_inference.run import sample as sample
