"""The arrays in the states of hooks, which a checkpoint has in a file of their own: in JSON a rollout would be larger
than what is read of metadata.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

_ARRAY: Final = "array of hooks"  # the key of a dict that stands for an array, and has its name


def without_arrays(states: Any, arrays: dict[str, np.ndarray], place: str = "hooks") -> Any:
    """Return states of hooks with a name in place of each array.

    Args:
        arrays: The dict that takes the arrays, by these names.
    """
    match states:
        case np.ndarray():
            arrays[place] = states
            return {_ARRAY: place}
        case Mapping():
            return {key: without_arrays(state, arrays, f"{place}.{key}") for key, state in states.items()}
        case list() | tuple():
            return [without_arrays(state, arrays, f"{place}.{index}") for index, state in enumerate(states)]
    return states


def with_arrays(states: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return what `without_arrays` was given; a tuple is a list, as in JSON.

    Raises:
        LookupError: There is no array of a name.
    """
    match states:
        case Mapping() if _ARRAY in states:
            return arrays[states[_ARRAY]]
        case Mapping():
            return {key: with_arrays(state, arrays) for key, state in states.items()}
        case list():
            return [with_arrays(state, arrays) for state in states]
    return states
