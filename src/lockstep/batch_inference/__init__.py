"""Batch inference (`lockstep sample`): one checkpoint, many hosts, every prompt completed exactly once."""

from lockstep.batch_inference.checkpoint import Checkpoint as Checkpoint
from lockstep.batch_inference.checkpoint import checkpoint_at as checkpoint_at
from lockstep.batch_inference.checkpoint import load as load
from lockstep.batch_inference.checkpoint import resolve_checkpoint as resolve_checkpoint
from lockstep.batch_inference.config import CheckpointFields as CheckpointFields
from lockstep.batch_inference.config import JobConfig as JobConfig
from lockstep.batch_inference.config import SampleConfig as SampleConfig
from lockstep.batch_inference.run import sample as sample
