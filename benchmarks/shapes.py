"""What is generated: random models and a few loads, the same for every contestant."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.sizes import sized
from lockstep.models import DecoderWeights, Experts, LayerWeights, LlamaConfig, Qwen3MoeConfig
from lockstep.placement import place
from lockstep.types import Request, SamplingParams

VOCAB = sized(32000, 2048)
MODEL = LlamaConfig(
    max_seq_len=1024, num_heads=8, num_kv_heads=4,
    hidden_dim=sized(512, 64), intermediate_dim=sized(1376, 128), num_layers=sized(8, 2),
)  # fmt: skip
"""56 M parameters."""
EXPERTS = Qwen3MoeConfig(
    max_seq_len=1024, hidden_dim=sized(512, 64), intermediate_dim=sized(1536, 128), num_layers=sized(4, 2),
    num_heads=8, num_kv_heads=4, head_dim=64,
    experts=Experts(num_experts=sized(128, 16), num_experts_per_tok=8, intermediate_dim=sized(192, 24)),
)  # fmt: skip
"""A quarter of Qwen3-30B-A3B in each width, with as many experts: 188 M parameters, 19 M of them for a token."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Prompts of equal length.

    Args:
        prompts: The number of prompts.
        prompt_tokens: The tokens of each prompt.
        new_tokens: The tokens of each answer, never stopped early.
        sampling: Other sampling parameters; greedy without any.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def requests(self, new_tokens: int | None = None) -> list[Request]:
        """The prompts, with another number of new tokens if one is given."""
        rng = np.random.default_rng(0)
        params = SamplingParams(max_new_tokens=new_tokens or self.new_tokens, **self.sampling)
        return [
            Request(
                prompt_id=i, prompt_tokens=tuple(rng.integers(0, VOCAB, self.prompt_tokens).tolist()), params=params
            )
            for i in range(self.prompts)
        ]

    def __str__(self) -> str:
        return f"{self.prompts} × {self.prompt_tokens} prompt tokens, {self.new_tokens} new"


@dataclasses.dataclass(frozen=True)
class Mix:
    """Requests of different lengths, more of them than fit at once.

    Args:
        count: The number of requests.
        prompt_tokens: The tokens of the longest prompt; the shortest has 16.
        new_tokens: The tokens of the longest answer; the shortest has 16.
        slots: The sequences that decode at a time.
    """

    count: int
    prompt_tokens: int
    new_tokens: int
    slots: int

    def requests(self) -> list[Request]:
        """The same at every call."""
        rng = np.random.default_rng(1)
        return [
            Request(
                prompt_id=i,
                prompt_tokens=tuple(rng.integers(0, VOCAB, rng.integers(16, self.prompt_tokens + 1)).tolist()),
                params=SamplingParams(max_new_tokens=int(rng.integers(16, self.new_tokens + 1))),
            )
            for i in range(self.count)
        ]

    def __str__(self) -> str:
        return (
            f"{self.count} requests on {self.slots} slots, "
            f"prompts of 16 to {self.prompt_tokens}, 16 to {self.new_tokens} new"
        )


def random_weights(mesh: Mesh, config: LlamaConfig = MODEL, vocab: int = VOCAB) -> DecoderWeights:
    """Float32 weights, sharded over ``fsdp`` along the embedding axis as lockstep's trainer shards them."""
    rng = np.random.default_rng(0)
    layers, embed, mlp, head = config.num_layers, config.hidden_dim, config.intermediate_dim, config.head_size
    kv, group = config.num_kv_heads, config.q_heads_per_group

    def normal(*shape: int, fsdp: int) -> jax.Array:
        host = rng.standard_normal(shape, np.float32) * 0.02
        return place(
            host, NamedSharding(mesh, PartitionSpec(*("fsdp" if i == fsdp else None for i in range(len(shape)))))
        )

    def ones(*shape: int) -> jax.Array:
        return place(np.ones(shape, np.float32), NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "fsdp")))

    if config.experts is None:
        inner = {
            "gate": normal(layers, embed, mlp, fsdp=1),
            "up": normal(layers, embed, mlp, fsdp=1),
            "down": normal(layers, mlp, embed, fsdp=2),
        }
    else:
        every, width = config.experts.num_experts, config.expert_dim
        inner = {
            "router": normal(layers, embed, every, fsdp=1),
            "expert_gate": normal(layers, every, embed, width, fsdp=2),
            "expert_up": normal(layers, every, embed, width, fsdp=2),
            "expert_down": normal(layers, every, width, embed, fsdp=3),
        }
    if config.qk_norm:
        whole = NamedSharding(mesh, PartitionSpec())
        inner |= {name: place(np.ones((layers, head), np.float32), whole) for name in ("q_norm", "k_norm")}
    return DecoderWeights(
        embed=normal(vocab, embed, fsdp=1),
        layers=LayerWeights(
            attn_norm=ones(layers, embed),
            q=normal(layers, embed, kv, group, head, fsdp=1),
            k=normal(layers, embed, kv, head, fsdp=1),
            v=normal(layers, embed, kv, head, fsdp=1),
            o=normal(layers, kv, group, head, embed, fsdp=4),
            mlp_norm=ones(layers, embed),
            **inner,
        ),
        final_norm=ones(embed),
        lm_head=normal(embed, vocab, fsdp=0),
    )
