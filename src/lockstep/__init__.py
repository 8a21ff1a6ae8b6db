"""Lockstep: see what your model says while it trains on a TPU pod."""

from lockstep.callback import InferenceEvalConfig as InferenceEvalConfig
from lockstep.callback import SampleCallback as SampleCallback
from lockstep.engine import Engine as Engine
from lockstep.engine import EngineConfig as EngineConfig
from lockstep.engine import audit as audit
from lockstep.errors import LockstepError as LockstepError
from lockstep.hosts import DistributedConfig as DistributedConfig
from lockstep.hosts import Hosts as Hosts
from lockstep.hosts import leader_only as leader_only
from lockstep.hosts import run_main as run_main
from lockstep.hosts import start as start
from lockstep.text import StopFinder as StopFinder
from lockstep.types import Completion as Completion
from lockstep.types import FinishReason as FinishReason
from lockstep.types import Request as Request
from lockstep.types import SamplingParams as SamplingParams
