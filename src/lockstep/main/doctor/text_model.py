"""A small model, its tokenizer and its data, made of a text that is in this file: the self-test needs no download."""

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from jax.sharding import Mesh

from lockstep.models import LlamaConfig
from lockstep.placement import tensor_sizes
from lockstep.training import TokenizedRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT: Final = """\
A model on a pod is in pieces, one on each chip, and no host has all of it. So every host takes part in every answer: \
they wait for each other, hear the same question, run the same programs in the same order, and wait for each other \
again. Then one of them writes down what was said, and training goes on as if nothing had happened.
"""
"""What the model learns by heart; each character is a token."""
PROMPTS: Final = ("A model on a pod ", "every host", "the same", "T")
LENGTH: Final = 64
"""The tokens of a row."""
_SPECIAL: Final = ("<end>", "<unknown>")


def make_tokenizer() -> "PreTrainedTokenizerBase":
    """A tokenizer whose tokens are the characters of `TEXT`, the same on every host."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIAL, *sorted(set(TEXT))]
    # Byte-pair encoding without merges: every character by itself.
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=_SPECIAL[1]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_SPECIAL[0], unk_token=_SPECIAL[1])


def make_rows(tokenizer: "PreTrainedTokenizerBase", count: int) -> TokenizedRows:
    """Windows of the text.

    Args:
        tokenizer: The tokenizer.
        count: The number of rows.
    """
    text = np.array(tokenizer.encode(TEXT), np.int32)
    starts = np.random.default_rng(0).integers(0, len(text), count)
    tokens = np.stack([np.take(text, np.arange(start, start + LENGTH), mode="wrap") for start in starts])
    return TokenizedRows(columns={"tokens": tokens, "loss_mask": np.ones_like(tokens, bool)}, seed=0)


def shape_for(mesh: Mesh) -> LlamaConfig:
    """A small shape whose axes the mesh divides, in training and in every layout of decoding.

    Args:
        mesh: The training mesh.
    """
    cpu = mesh.devices.flat[0].platform == "cpu"
    head, width = (16, 32) if cpu else (128, 256)  # 128: what the TPU's attention kernel reads at once
    hidden, kv_heads = math.lcm(width, mesh.shape["fsdp"]), math.lcm(2, mesh.shape["tp"])
    # Few kv heads, so that layouts of more devices repeat them; where their numbers do not nest, one for each device.
    if any(size % kv_heads and kv_heads % size for size in tensor_sizes(dict(mesh.shape))):
        kv_heads = mesh.size
    return LlamaConfig(
        max_seq_len=2 * LENGTH,
        hidden_dim=hidden,
        intermediate_dim=math.lcm(2 * hidden, mesh.size),
        num_layers=2,
        num_heads=math.lcm(2 * kv_heads, mesh.size),
        num_kv_heads=kv_heads,
        head_dim=head,
        gradient_checkpointing=False,
        initializer_range=0.1,
    )
