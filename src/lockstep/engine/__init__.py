"""Paged-attention generation on the devices that a model is sharded over."""

from lockstep.engine.arrivals import Arrivals as Arrivals
from lockstep.engine.audit import Auditor as Auditor
from lockstep.engine.audit import AuditResult as AuditResult
from lockstep.engine.audit import audit as audit
from lockstep.engine.config import CapacityFields as CapacityFields
from lockstep.engine.config import EngineConfig as EngineConfig
from lockstep.engine.config import layout_text as layout_text
from lockstep.engine.decode_model import DecodeModel as DecodeModel
from lockstep.engine.decoder.forward import ExactForward as ExactForward
from lockstep.engine.decoder.forward import exact_logprobs as exact_logprobs
from lockstep.engine.engine import Engine as Engine
from lockstep.engine.idle_replicas import count_memories as count_memories
from lockstep.engine.launches import Gate as Gate
from lockstep.engine.launches import Observer as Observer
from lockstep.engine.rollout_engine import RolloutEngine as RolloutEngine
from lockstep.engine.sampling.sampler import never_used as never_used
from lockstep.engine.sampling_fields import DraftSource as DraftSource
from lockstep.engine.sampling_fields import EarlierAnswers as EarlierAnswers
from lockstep.engine.sampling_fields import SamplingBlock as SamplingBlock
from lockstep.engine.sampling_fields import SamplingFields as SamplingFields
from lockstep.engine.session import Generation as Generation
from lockstep.engine.session import PhaseClock as PhaseClock
from lockstep.engine.session import Session as Session
from lockstep.engine.sizing.cost_model import used_weights as used_weights
from lockstep.engine.sizing.result import Sizing as Sizing
