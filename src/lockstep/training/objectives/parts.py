"""The result of an objective: sums, so that microbatches add up to the same loss as one batch."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxtyping import Array, Float, PyTree


class LossParts(NamedTuple):
    """Sums over a (micro)batch. The loss and each metric are the sum over the whole batch divided by ``weight``."""

    total: Float[Array, ""]
    """The sum of losses, float32."""
    weight: Float[Array, ""]
    """What the sums are divided by, e.g. the number of tokens; it must not depend on the parameters."""
    metrics: Mapping[str, Float[Array, ""]]
    """Sums of further metrics by name, with the same weight."""


class LossFn(Protocol):
    """An objective: a pure function of a model in the compute type and a batch of arrays with the row as axis 0."""

    def __call__(self, model: PyTree, batch: Mapping[str, Array], /) -> LossParts:
        """Compute the sums of one (micro)batch inside the train step."""
        ...
