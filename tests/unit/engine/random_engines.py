"""Random models, meshes, layouts, capacities and requests, each from one number: what a whole engine must cope with."""

import dataclasses
import random
from typing import Any

from lockstep.engine import EngineConfig
from lockstep.models import Experts, LlamaConfig
from lockstep.types import Request, SamplingParams

VOCABULARIES = (17, 29, 41, 53)
"""Primes: no number of devices divides them."""
MESHES = ("1,1,1", "4,1,1", "2,2,1", "1,4,1", "1,2,2", "1,1,3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomCase:
    """An engine, what it decodes, and on which devices."""

    model: LlamaConfig
    vocab: int
    mesh: str
    engine: EngineConfig
    requests: tuple[Request, ...]


def random_case(seed: int) -> RandomCase:
    """1 to 3 layers, 1 to 9 heads, odd widths where the mesh divides them; odd numbers have experts.

    Nine numbers in a row have every depth in every kind of layout.
    """
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    _, fsdp, tp = (int(size) for size in mesh.split(","))
    tensor = rng.choice(_tensor_sizes(mesh))
    layout: Any = ({"tensor": tensor}, "training", "auto")[(seed + seed // 3) % 3]
    heads = [(k, g) for k in range(tp, 10, tp) for g in range(1, 9 // k + 1) if _splits(tensor, k, g)]
    kv_heads, group = rng.choice(heads)
    if isinstance(layout, dict) and tensor > kv_heads and seed % 4 != 1:
        layout = layout | {"context": tensor // kv_heads}  # positions are split; else the kv heads are repeated
    vocab = rng.choice(VOCABULARIES) * tp
    max_seq_len, extra = rng.randint(24, 64), rng.choice([None, None, "qkv_bias", "qk_norm"])
    model = LlamaConfig(
        max_seq_len=max_seq_len,
        hidden_dim=fsdp * (2 * rng.randint(2, 12) + 1),
        intermediate_dim=max(tp, tensor) * (2 * rng.randint(2, 12) + 1),
        num_layers=1 + seed % 3,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=2 * rng.randint(1, 9),
        qkv_bias=extra == "qkv_bias",
        qk_norm=extra == "qk_norm",
        tie_word_embeddings=rng.random() < 0.3,
        experts=_experts(seed, tp, tensor) if seed % 2 else None,
        gradient_checkpointing=False,
    )
    page_size = rng.choice([4, 8, 16])
    engine = EngineConfig(
        layout=layout,
        max_seq_len=max_seq_len,
        page_size=page_size,
        max_seqs=rng.choice([None, 1, 2, 5]),
        max_pages=rng.choice([None, -(-max_seq_len // page_size) + rng.randint(1, 6)]),
        max_prefill_size=rng.choice([None, page_size * rng.randint(1, 3)]),
        max_steps_per_launch=rng.choice([1, 3, 8, 64]),
        max_prompts_per_batch=rng.choice([None, 2]),
        share_prefixes=rng.random() < 0.7,
        memory_bytes_per_device=2**28,
    )
    requests = tuple(_request(rng, number, vocab, max_seq_len) for number in range(rng.randint(2, 6)))
    return RandomCase(model=model, vocab=vocab, mesh=mesh, engine=engine, requests=requests)


def _tensor_sizes(mesh: str) -> list[int]:
    """The sizes of a replica that nest with the axes of the mesh."""
    return {"1,1,1": [1], "1,1,3": [1, 3]}.get(mesh, [1, 2, 4])


def _splits(tensor: int, kv_heads: int, group: int) -> bool:
    """Whether so many devices can share the heads: whole kv heads each, or copies of one kv head."""
    return kv_heads % tensor == 0 or tensor % kv_heads == 0 and group % (tensor // kv_heads) == 0


def _experts(seed: int, tp: int, tensor: int) -> Experts:
    """1 to 16 experts, shared out whole or, where their number does not allow it, by their width."""
    rng = random.Random(f"experts {seed}")
    number = rng.choice([tensor * rng.randint(1, 4), rng.randint(1, 9)])
    return Experts(
        num_experts=number,
        num_experts_per_tok=rng.randint(1, min(number, 4)),
        intermediate_dim=max(tp, tensor if number % tensor else 1) * (2 * rng.randint(1, 5) + 1),
        norm_topk_prob=rng.random() < 0.5,
    )


def _request(rng: random.Random, number: int, vocab: int, max_seq_len: int) -> Request:
    length, drawn = rng.randint(1, max_seq_len - 8), rng.random() < 0.6
    filters = {"top_k": rng.choice([None, 1, 5]), "top_p": rng.choice([1.0, 0.7]), "min_p": rng.choice([0.0, 0.05])}
    # Prompts begin with the same tokens, so that there are prefixes to share.
    common = [token % vocab for token in range(3, 3 + 5 * length, 5)]
    tokens = common[: rng.randint(0, length)]
    tokens += [rng.randrange(vocab) for _ in range(length - len(tokens))]
    params = SamplingParams(
        max_new_tokens=rng.randint(1, 8),
        n_generations=rng.randint(1, 3),
        stop_token_ids=tuple(rng.sample(range(vocab), rng.randint(0, 3))),
        **({"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.randrange(2**32), **filters} if drawn else {}),
    )
    return Request(prompt_id=rng.randrange(2**32), prompt_tokens=tuple(tokens), params=params)
