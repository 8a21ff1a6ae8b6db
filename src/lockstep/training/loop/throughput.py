"""How fast training is: tokens per second, the use of the devices, the wait for data."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.models import LlamaConfig, LoraModel, UnreadableModelError, layer_products, read_decoder
from lockstep.placement.device import published_chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """The figures of one step.

    Args:
        rows: The number of rows of the batch.
        tokens: The number of token positions of the batch, those that are masked too; None where it has no tokens.
        step_s: The seconds from the launch of the step to its figures.
        wait_s: The seconds before it in which the devices waited for the batch.
        mfu: The model's floating-point operations per second, as a fraction of the peak of all devices; None where
            either is not known.
    """

    rows: int
    tokens: int | None
    step_s: float
    wait_s: float
    mfu: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, the wait for data included."""
        return None if self.tokens is None else self.tokens / (self.step_s + self.wait_s)

    def metrics(self) -> dict[str, float]:
        """Return the figures as a tracker gets them: ``throughput/…``, durations in seconds."""
        values = {
            "throughput/step_duration_s": self.step_s,
            "throughput/examples_per_s": self.rows / self.step_s,
            "throughput/data_wait_s": self.wait_s,
        }
        if self.tokens_per_s is not None:
            values["throughput/tokens_per_s"] = self.tokens_per_s
        if self.mfu is not None:
            values["throughput/mfu"] = self.mfu
        return values

    def __str__(self) -> str:
        parts = [] if self.tokens_per_s is None else [f"{self.tokens_per_s:,.0f} tokens/s"]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        return "  ".join([*parts, f"data wait {self.wait_s / (self.step_s + self.wait_s):.0%}"])


class Meter:
    """Measures the steps of a run.

    Args:
        mesh: The mesh of the run.
        model: The model that is trained. What it computes per token is known where the decoder can read it.
    """

    def __init__(self, mesh: Mesh, model: Any) -> None:
        self._peak = peak_flops(mesh)
        self._shape: tuple[LlamaConfig, int] | None = None
        self._adapters: int | None = None
        with contextlib.suppress(UnreadableModelError):
            config, weights = read_decoder(model)
            self._shape = config, weights.embed.shape[0]
        if isinstance(model, LoraModel):
            self._adapters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.adapters))

    def step(self, batch: Mapping[str, Any], *, step_s: float, wait_s: float) -> Throughput:
        """Return the figures of a step.

        Args:
            batch: The global arrays of the batch; the positions of ``tokens`` ``[row, ..., position]`` are counted.
            step_s: The seconds from the launch of the step to its figures.
            wait_s: The seconds before it in which the devices waited for the batch.
        """
        rows = next(iter(batch.values())).shape[0]
        tokens = math.prod(batch["tokens"].shape) if "tokens" in batch else None
        mfu = None
        if tokens is not None and self._shape is not None and self._peak:
            flops = tokens * flops_per_token(*self._shape, batch["tokens"].shape[-1], self._adapters)
            mfu = flops / (step_s + wait_s) / self._peak
        return Throughput(rows=rows, tokens=tokens, step_s=step_s, wait_s=wait_s, mfu=mfu)


def peak_flops(mesh: Mesh) -> float:
    """Return the published 16-bit operations per second of all devices of a mesh; 0 where one has no such number.

    Args:
        mesh: The mesh of the run.
    """
    chips = [published_chip(device) for device in mesh.devices.flat]
    return sum(chip.flops for chip in chips if chip is not None) if all(chips) else 0.0


def flops_per_token(model: LlamaConfig, vocab_size: int, length: int, adapters: int | None = None) -> float:
    """Return the operations that training with one token needs, without those that rematerialisation repeats.

    They are 6 per weight of a matrix product, and 12 per layer, position and element of the query heads (PaLM,
    Chowdhery et al. 2022, arXiv 2204.02311, appendix B). The embedding is looked up, not multiplied. A frozen weight
    needs 4: it has no gradient.

    Args:
        model: The shape of the model.
        vocab_size: The number of columns of the output layer.
        length: The number of positions of a sequence.
        adapters: The number of weights of the adapters, where they alone are trained; None where all weights are.
    """
    queries = model.num_heads * model.head_size
    weights = layer_products(model) + model.hidden_dim * vocab_size
    products = 6.0 * weights if adapters is None else 4.0 * weights + 6.0 * adapters
    return products + 12.0 * model.num_layers * queries * length
