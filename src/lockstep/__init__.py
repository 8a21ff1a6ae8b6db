"""Lockstep: see what your model says while it trains on a TPU pod.

A name below is imported when it is first used: what only starts processes, or prints a help text, does not wait for the
engine and its libraries.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.callback import InferenceEvalConfig as InferenceEvalConfig
    from lockstep.callback import SampleCallback as SampleCallback
    from lockstep.engine import Engine as Engine
    from lockstep.engine import EngineConfig as EngineConfig
    from lockstep.engine.audit import audit as audit  # a module of that name too: mypy finds both in the package
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.hosts import DistributedConfig as DistributedConfig
    from lockstep.hosts import Hosts as Hosts
    from lockstep.hosts import leader_only as leader_only
    from lockstep.hosts import run_main as run_main
    from lockstep.hosts.start import start as start
    from lockstep.text import StopFinder as StopFinder
    from lockstep.types import Completion as Completion
    from lockstep.types import FinishReason as FinishReason
    from lockstep.types import Request as Request
    from lockstep.types import SamplingParams as SamplingParams

_NAMES = {
    "callback": ("InferenceEvalConfig", "SampleCallback"),
    "engine": ("Engine", "EngineConfig", "audit"),
    "errors": ("LockstepError",),
    "hosts": ("DistributedConfig", "Hosts", "leader_only", "run_main", "start"),
    "text": ("StopFinder",),
    "types": ("Completion", "FinishReason", "Request", "SamplingParams"),
}
"""The public names, by the package or module of lockstep that has them."""

_PACKAGES = ("check", "models", "placement", "report", "testing")
"""Further packages with names for users: ``lockstep.models.view`` needs no import of its own."""

_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a checker knows the names from above: to it, any other is an error

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(f"lockstep.{_HOME[name]}"), name)
            globals()[name] = value
            return value
        if name in _NAMES or name in _PACKAGES:
            return importlib.import_module(f"lockstep.{name}")
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_NAMES, *_PACKAGES})
