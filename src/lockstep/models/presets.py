"""Presets: the configurations of well-known checkpoints, for planning where a checkpoint cannot be read."""

import dataclasses
import re
from typing import Final

from lockstep.models.config import Llama3Scaling, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, RotaryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """The configuration that the ``config.json`` of a checkpoint has.

    Args:
        config: The configuration of the model.
        vocab_size: The number of rows of its embedding.
    """

    config: LlamaConfig
    vocab_size: int


def _llama(hidden: int, mlp: int, layers: int, heads: int, *, context: int, factor: float | None, tied: bool = False,
           head_dim: int | None = None) -> ModelPreset:  # fmt: skip
    scaling = None if factor is None else Llama3Scaling(factor=factor)
    config = LlamaConfig(
        max_seq_len=context, hidden_dim=hidden, intermediate_dim=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=8, head_dim=head_dim, tie_word_embeddings=tied, rope=RotaryConfig(theta=5e5, scaling=scaling),
    )  # fmt: skip
    return ModelPreset(config=config, vocab_size=128256)


def _qwen(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, vocab: int) -> ModelPreset:
    config = Qwen2Config(
        max_seq_len=32768, hidden_dim=hidden, intermediate_dim=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, tie_word_embeddings=tied, rope=RotaryConfig(theta=1e6),
    )  # fmt: skip
    return ModelPreset(config=config, vocab_size=vocab)


# Llama: https://arxiv.org/abs/2407.21783, table 3, and the models' cards; Qwen2.5: https://arxiv.org/abs/2412.15115,
# table 1; Qwen3: https://arxiv.org/abs/2505.09388, table 1; the rest is in each checkpoint's config.json.
PRESETS: Final[dict[str, ModelPreset]] = {
    "llama-3-8b": _llama(4096, 14336, 32, 32, context=8192, factor=None),
    "llama-3-70b": _llama(8192, 28672, 80, 64, context=8192, factor=None),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, context=131072, factor=8),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, context=131072, factor=8),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, context=131072, factor=32, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, context=131072, factor=32, tied=True),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64, context=131072, factor=8),
    "qwen2.5-0.5b": _qwen(896, 4864, 24, 14, 2, tied=True, vocab=151936),
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, tied=True, vocab=151936),
    "qwen2.5-3b": _qwen(2048, 11008, 36, 16, 2, tied=True, vocab=151936),
    "qwen2.5-7b": _qwen(3584, 18944, 28, 28, 4, tied=False, vocab=152064),
    "qwen3-8b": ModelPreset(
        config=Qwen3Config(
            max_seq_len=40960, hidden_dim=4096, intermediate_dim=12288, num_layers=36, num_heads=32, num_kv_heads=8,
            rope=RotaryConfig(theta=1e6),
        ),
        vocab_size=151936,
    ),
    "mistral-7b-v0.3": ModelPreset(
        config=MistralConfig(
            max_seq_len=32768, hidden_dim=4096, intermediate_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8,
            rope=RotaryConfig(theta=1e6),
        ),
        vocab_size=32768,
    ),
}  # fmt: skip


def find_preset(name: str) -> ModelPreset | None:
    """Returns the preset of a checkpoint, by the last part of its path.

    Args:
        name: The path, such as ``gs://bucket/models/Meta-Llama-3-8B-Instruct``; case, ``Meta-`` and ``-Instruct`` do
            not count.

    Returns:
        The preset, or None if there is none.
    """
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return PRESETS.get(re.sub(r"-(instruct|base|it)\b", "", last))
