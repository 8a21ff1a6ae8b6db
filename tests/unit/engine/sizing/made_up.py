"""Sizes chosen from made-up memory."""

from typing import Any

from lockstep.engine import EngineConfig
from lockstep.engine.decode_model import DecodeModels
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.result import Sizing
from lockstep.errors import CapacityError
from lockstep.models import read_decoder
from lockstep.types import Request
from tests.unit.engine.models import mesh_of, model_on

ROOMY = 2**40


def choose(requests: list[Request], free: int, mesh: str = "1,2,2", **options: Any) -> Sizing:
    config = EngineConfig(**options)
    return Chooser(config=config, models=models_on(config, mesh), requests=requests, free=free).choose()


_MADE: dict[tuple[str, str], DecodeModels] = {}


def models_on(config: EngineConfig, mesh: str = "1,2,2") -> DecodeModels:
    key = repr(config), mesh
    if key not in _MADE:
        _MADE[key] = DecodeModels(config, *read_decoder(model_on(mesh)), mesh_of(mesh))
    return _MADE[key]


def least_that_works(requests: list[Request], within: int = 1, **options: Any) -> int:
    """Free bytes from which on the requests are accepted, or up to ``within`` more."""
    roomy = choose(requests, ROOMY, **options)
    low, high = 0, int(roomy.predicted.total / EngineConfig(**options).hbm_utilization) + 1
    choose(requests, high, **options)  # accepts them, as the search takes for granted
    while high - low > within:
        middle = (low + high) // 2
        try:
            choose(requests, middle, **options)
        except CapacityError:
            low = middle
        else:
            high = middle
    return high
