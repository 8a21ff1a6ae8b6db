"""One checkpoint, many hosts: each prompt completed exactly once (`lockstep sample`), or tasks (`lockstep eval`)."""

from lockstep.batch_inference.checkpoint import Checkpoint as Checkpoint
from lockstep.batch_inference.checkpoint import checkpoint_at as checkpoint_at
from lockstep.batch_inference.checkpoint import load as load
from lockstep.batch_inference.checkpoint import resolve_checkpoint as resolve_checkpoint
from lockstep.batch_inference.config import JobConfig as JobConfig
from lockstep.batch_inference.config import SampleConfig as SampleConfig
from lockstep.batch_inference.evaluation import EvalConfig as EvalConfig
from lockstep.batch_inference.evaluation import evaluate as evaluate
from lockstep.batch_inference.run import sample as sample
