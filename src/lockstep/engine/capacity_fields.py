"""The capacities that `EngineConfig` and the configuration blocks that bring an engine of their own have in common."""

import dataclasses

Layout = dict[str, int] | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityFields:
    """How much the engine may hold and where it decodes. Null means that lockstep works it out; a number is a cap.

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
    ``{tensor: N}``: weights are moved once per round, N devices share a copy. ``auto``: of those that fit, the one with
    the least predicted time. ``{tensor: 1, replicas: M}``: all have the weights, M of them decode. On CPU devices
    share a memory, and ``auto`` has one for each do so: per process, or one where all processes are on one machine."""
    calibration: str | None = None
    """A file of measured numbers of the devices, which every host has, for ``auto`` to predict with: bandwidth,
    operations, and the seconds of small collectives. Null: published numbers."""
