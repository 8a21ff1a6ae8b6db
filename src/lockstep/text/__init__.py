"""Text in and out: tokenizers and prompts."""

from lockstep.text.prompts import MAX_LINE_BYTES, Prompt, PromptFields, PromptSource, encode, iter_prompts, read_prompts
from lockstep.text.stop import StopFinder, cut_at_stop
from lockstep.text.tokenizer import (
    check_vocab,
    decode,
    load_tokenizer,
    stop_ids,
    token_count,
    token_texts,
    tokenizer_digest,
)

__all__ = [
    "MAX_LINE_BYTES",
    "Prompt",
    "PromptFields",
    "PromptSource",
    "StopFinder",
    "check_vocab",
    "cut_at_stop",
    "decode",
    "encode",
    "iter_prompts",
    "load_tokenizer",
    "read_prompts",
    "stop_ids",
    "token_count",
    "token_texts",
    "tokenizer_digest",
]
