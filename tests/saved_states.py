"""States of hooks as a later process has them from a checkpoint."""

import json
from typing import Any

import safetensors.numpy

from lockstep.training.checkpoints.checkpoint import with_arrays, without_arrays


def as_saved(states: Any) -> Any:
    """The states, written and read again."""
    arrays: dict[str, Any] = {}
    text = json.dumps(without_arrays(states, arrays))
    return with_arrays(json.loads(text), safetensors.numpy.load(safetensors.numpy.save(arrays)))
