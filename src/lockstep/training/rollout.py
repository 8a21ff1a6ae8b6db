"""The ``rollout`` block of a configuration."""

import dataclasses

from lockstep.engine import EngineConfig
from lockstep.errors import ConfigError
from lockstep.types import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are sampled before each step, from the very weights that the step then changes.

    Raises:
        ConfigError: a value that cannot work.
    """

    n_generations: int = 8
    """Answers per prompt: the group that an answer's reward is compared with."""
    max_new_tokens: int = 512
    """Tokens to sample per answer at most."""
    temperature: float = 1.0
    """Logits are divided by it; it must be more than 0, or all answers of a prompt would be the same."""
    top_k: int | None = None
    """Draw from the k most probable tokens; null: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of most probable tokens that has this probability; 1: from all."""
    seed: int = 0
    """With step, prompt, generation and position, all that a random draw depends on."""
    max_seqs: int | None = None
    """Sequences decoded at a time; more wait their turn. Null: worked out."""
    page_size: int | None = None
    """Tokens per page of the KV cache. Null: worked out."""
    max_pages: int | None = None
    """Pages of one replica's KV cache. Null: worked out."""
    max_prefill_size: int | None = None
    """Prompt tokens that a replica prefills in one launch. Null: worked out."""
    hbm_utilization: float = 0.9
    """Share of the free device memory that sampling may use."""
    layout: dict[str, int] | str = "auto"
    """auto | training | {tensor: N} | {tensor: 1, replicas: M}: where the weights lie while decoding."""

    def __post_init__(self) -> None:
        if self.n_generations < 2:
            raise ConfigError(
                f"rollout.n_generations is {self.n_generations}; an answer is judged against the others to the same "
                "prompt, so it must be at least 2. The usual is 8."
            )
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature is {self.temperature}; it must be more than 0, or all answers to a prompt would "
                "be the same and nothing could be learned. The usual is 1."
            )
        try:
            self.sampling_params(())
            self.engine_config(None, None)
        except ConfigError as error:
            raise ConfigError(f"rollout: {error}") from None

    def sampling_params(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        """How every prompt is sampled.

        Args:
            stop_ids: of the tokenizer.
        """
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=stop_ids,
            seed=self.seed,
            n_generations=self.n_generations,
            top_k=self.top_k,
            top_p=self.top_p,
        )

    def engine_config(self, dtype: str | None, max_seq_len: int | None) -> EngineConfig:
        """The engine's part of the block.

        Args:
            dtype: to decode in; None: the dtype of the parameters.
            max_seq_len: tokens of prompt and answer together: those of a row of the batch.
        """
        return EngineConfig(
            max_seq_len=max_seq_len,
            max_seqs=self.max_seqs,
            page_size=self.page_size,
            max_pages=self.max_pages,
            max_prefill_size=self.max_prefill_size,
            hbm_utilization=self.hbm_utilization,
            layout=self.layout,
            dtype=dtype,
        )
