"""Capacities and decode layout of the engine: its own configuration, and the fields that other blocks share with it."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError, check_at_least
from lockstep.models import Experts
from lockstep.placement.device import FP8, platform_of

Layout = dict[str, int] | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityFields:
    """Capacities and decode layout of the engine. Null means that lockstep works it out; a number is a cap.

    `EngineConfig` checks the values.
    """

    max_seqs: int | None = None
    """Sequences decoded at a time, over all replicas; more wait their turn. Null: all of them, or as many as fit, up to
    where a step begins to take longer with each: 64 to 512 per replica, by the device's memory bandwidth and speed."""
    page_size: int | None = None
    """Tokens per page of the KV cache. Null: 16; on TPU 64, or 128 where the page tables of so many long sequences
    would not fit in the scalar memory of a core."""
    max_pages: int | None = None
    """Pages of one replica's KV cache; what does not fit waits its turn. Null: enough for its sequences at their
    longest, or what fits."""
    max_prefill_size: int | None = None
    """Prompt tokens that a replica prefills in one launch. Null: up to 512; fewer if memory is short."""
    max_prompts_per_batch: int | None = None
    """Prompts that the scheduler has at a time, waiting and being answered; the next is read when one has all its
    answers. Null: enough to fill every slot twice."""
    hbm_utilization: float = 0.9
    """Share of the free device memory that sampling may use; free is what the device with the least free memory of all
    hosts has left."""
    memory_bytes_per_device: int | None = None
    """Free memory to assume on each device of this host, in bytes. Null: ask the device."""
    kv_cache_dtype: str = "auto"
    """``auto``: K and V are kept in the dtype that the engine computes in. ``fp8``: in 8 bits (E4M3,
    without scales): twice the pages of bfloat16. Log-probabilities are then those of the rounded K and V, and the
    ``logprob_gap`` of an audit measures the rounding too."""
    weight_dtype: str = "auto"
    """``auto``: weights are decoded with in the dtype that the engine computes in. ``int8``, ``fp8``: those of the
    layers' matrix products in 8 bits, with a scale per output channel, made anew each time that weights are resharded:
    half of bfloat16's bytes. Samples are then those of the rounded weights, and the ``logprob_gap`` of an
    audit measures the rounding too. ``int8`` rounds less."""
    layout: Layout = "auto"
    """``training``: weights stay where the trainer has them and are gathered layer by layer at every step.
    ``{tensor: N}``: weights are moved once per round, N devices share a copy; with ``context: M`` each kv head of fewer
    than N is not on M devices: they split its positions, for long texts; with ``expert: N`` each has whole experts,
    with ``expert: 1`` a part of each, else as is predicted to be faster. ``auto``: of those that fit, the one with the
    least predicted time. ``{tensor: 1, replicas: M}``: all have the weights, M of them decode. On CPU devices
    share a memory, and ``auto`` has one for each do so: per process, or one where all processes are on one machine."""
    calibration: FilePath | None = None
    """A file of measured numbers of the devices, which every host has, for ``auto`` to predict with: bandwidth,
    operations, and the seconds of small collectives. Null: published numbers."""


DEFAULT_PAGE_SIZE = 16
_LARGE_PAGE_SIZE = 64

_WEIGHT_DTYPES = {"auto": None, "int8": jnp.dtype(jnp.int8), "fp8": FP8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(CapacityFields):
    """Capacities of the engine. Null means that lockstep works it out; a number is a cap.

    Raises:
        ConfigError: A value cannot work; the error names the field, the value, the limit and the fix.

    Example:
        >>> lockstep.EngineConfig(max_seqs=8, layout={"tensor": 1}).hbm_utilization
        0.9
    """

    max_seq_len: int | None = None
    """Tokens of prompt and answer together, per sequence. Null: the longest request so far."""
    max_seqs_in_prefill: int | None = None
    """Sequences whose prompts a replica prefills in one launch. Null: as many as ``max_prefill_size`` has room for."""
    max_steps_per_launch: int | None = None
    """Tokens sampled per sequence in one launch. Null: up to 64."""
    share_prefixes: bool = True
    """Keep what several sequences begin with once, and prefill it once. False: every sequence by itself."""
    dtype: str | None = None
    """Floating dtype of weights, activations and KV cache while decoding. Null: the dtype of the parameters."""

    def __post_init__(self) -> None:
        check_fields(self, "engine.")
        fix = ". Set a larger number, or null to let lockstep work it out."
        check_at_least(self, 2, "max_seq_len", "max_pages", fix=fix)
        sequences = ("max_seqs", "max_seqs_in_prefill", "max_steps_per_launch", "max_prompts_per_batch")
        check_at_least(self, 1, "page_size", "max_prefill_size", *sequences, fix=fix)
        if not 0 < self.hbm_utilization <= 1:
            raise ConfigError(
                f"hbm_utilization is {self.hbm_utilization}; it must be more than 0 and at most 1, as a share of the "
                "free device memory. The default is 0.9."
            )
        check_at_least(self, 1, "memory_bytes_per_device", fix=". Set it to null to ask the device.")
        page_size = self.page_size or DEFAULT_PAGE_SIZE
        if self.max_prefill_size is not None and self.max_prefill_size < page_size:
            raise ConfigError(
                f"max_prefill_size is {self.max_prefill_size} tokens and page_size is {page_size}; prefill works page "
                f"by page. Set max_prefill_size to at least {page_size}, or page_size to at most "
                f"{self.max_prefill_size}."
            )
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ConfigError(
                f"dtype is {self.dtype!r}; it must be float32, bfloat16, float16 or null. Use null for the dtype of "
                "the parameters."
            )
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be auto or fp8. Use auto for the dtype that the "
                "engine computes in, which dtype sets."
            )
        if self.weight_dtype not in _WEIGHT_DTYPES:
            raise ConfigError(
                f"weight_dtype is {self.weight_dtype!r}; it must be {', '.join(_WEIGHT_DTYPES)}. Use auto for the "
                "dtype that the engine computes in, which dtype sets."
            )
        tensor_size(self.layout)

    def free_bytes(self, measure: Callable[[], int]) -> int:
        """The free memory to count on, on each device: ``memory_bytes_per_device``, or else what ``measure`` finds."""
        return measure() if self.memory_bytes_per_device is None else self.memory_bytes_per_device

    def first_page_size(self, platform: str) -> int:
        """Tokens in a page before page tables are too large: as configured, or larger where pages are copied one by
        one.
        """
        size = _LARGE_PAGE_SIZE if platform_of(platform).pages_one_by_one else DEFAULT_PAGE_SIZE
        while self.max_prefill_size is not None and size > self.max_prefill_size:
            size //= 2
        return self.page_size or size

    def kv_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """The dtype of the KV cache."""
        return FP8 if self.kv_cache_dtype == "fp8" else dtype

    @property
    def quantized_dtype(self) -> jnp.dtype | None:
        """The 8-bit dtype of the weights of matrix products; None where they have the one of the computation."""
        return _WEIGHT_DTYPES[self.weight_dtype]


def tensor_size(layout: Layout) -> int | None:
    """The number of devices that share a copy of the weights in ``layout``; None for ``training`` and ``auto``.

    Raises:
        ConfigError: This is not a layout.
    """
    if layout in ("auto", "training"):
        return None
    if isinstance(layout, dict) and set(layout) <= {"tensor", "expert", "replicas", "context"}:
        tensor = layout.get("tensor", layout.get("expert"))
        if tensor is not None and all(isinstance(size, int) and size >= 1 for size in layout.values()):
            if (tensor == 1 or "replicas" not in layout) and layout.get("expert", 1) in (1, tensor):
                return tensor
    raise ConfigError(
        f"layout is {layout!r}; it must be auto, training, {{tensor: N}}, {{tensor: N, context: M}}, {{tensor: N, "
        "expert: N or 1} for a model with experts, or {tensor: 1, replicas: M} with N and M at least 1. Use auto if in "
        "doubt."
    )


def context_size(layout: Layout) -> int:
    """The number of devices that split the positions of a sequence in ``layout``."""
    return layout.get("context", 1) if isinstance(layout, dict) else 1


def whole_experts(layout: Layout, experts: Experts | None) -> bool:
    """Whether each device of a replica has whole experts: as the layout says, else where it divides their number."""
    tensor = tensor_size(layout) or 1
    if experts is None or isinstance(layout, str) or tensor == 1:
        return False
    return layout.get("expert", 1 if experts.num_experts % tensor else tensor) == tensor


def layout_text(layout: Layout) -> str:
    """A layout as one writes it in a configuration."""
    return layout if isinstance(layout, str) else f"{{{', '.join(f'{name}: {n}' for name, n in layout.items())}}}"
