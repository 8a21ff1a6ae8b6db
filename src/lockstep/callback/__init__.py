"""Sampling inside a training loop."""

from lockstep.callback.config import InferenceEvalConfig as InferenceEvalConfig
from lockstep.callback.sample_callback import SampleCallback as SampleCallback
