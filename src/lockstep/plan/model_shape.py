"""The shape of a model that is planned, without its weights."""

import dataclasses
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.models import LlamaConfig, find_preset, load_config, padded_vocab_size, read_vocab_size
from lockstep.text import load_tokenizer, token_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's shape and where it was found."""

    config: LlamaConfig
    vocab_size: int  # number of rows of its embedding
    source: str


def shape_of(source: str | None, model: Any, tokenizer: str | None, key: str, trusted: str | None) -> Shape:
    """Return the shape of the ``model`` block, of a checkpoint that can be read, or of a well-known one by its name."""
    if source is None:
        assert isinstance(model, LlamaConfig) and tokenizer is not None
        if Path(tokenizer).expanduser().is_dir():
            tokens = token_count(load_tokenizer(tokenizer, trusted))
        elif known := find_preset(tokenizer):
            tokens = known.vocab_size
        else:
            raise ConfigError(
                f"the vocabulary of tokenizer {tokenizer!r} is not known here. Give a directory that holds the "
                "tokenizer: --tokenizer DIRECTORY."
            )
        return Shape(config=model, vocab_size=padded_vocab_size(tokens, 1), source="the model block")
    path = Path(source).expanduser()
    if (path / "config.json").is_file():
        return Shape(config=load_config(path), vocab_size=read_vocab_size(path), source=f"{path}/config.json")
    if known := find_preset(source):
        name = source.rstrip("/").rpartition("/")[2]
        return Shape(config=known.config, vocab_size=known.vocab_size, source=f"as published, by the name {name}")
    if "://" in source:
        return Shape(config=load_config(source), vocab_size=read_vocab_size(source), source=source)
    raise ConfigError(
        f"{key} is {source!r}, which is neither a directory with a config.json nor a checkpoint whose shape is known. "
        "Copy its config.json here and give --model DIRECTORY, or --model with the name of one of the same shape, such "
        "as --model Llama-3.1-8B."
    )
