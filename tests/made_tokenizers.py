"""Small tokenizers with the rules of real ones, as files; made in milliseconds."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["The capital of France is Paris. In 2023 and 1999 we don't know.\ndef add(a, b):\n    return a + b\n"] * 4
_LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*special: str, begin: str | None = None) -> tokenizers.Tokenizer:
    """As Llama 3's and DeepSeek's: byte-level BPE that splits as their pattern says, with ``begin`` before a text."""
    made = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA_3), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    names = [*([begin] if begin else []), *special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=360, special_tokens=names, initial_alphabet=alphabet, show_progress=False),
    )
    if begin:
        single = [(begin, made.token_to_id(begin))]
        made.post_processor = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A {begin} $B", single)
    return made


def sentencepiece(*special: str) -> tokenizers.Tokenizer:
    """As Llama 2's: a space before each part of a text, which decoding leaves out of the first; bytes for the rest."""
    names = ["<unk>", "<s>", "</s>", *special]
    vocab = {name: number for number, name in enumerate(names)}
    vocab |= {f"<0x{byte:02X}>": len(names) + byte for byte in range(256)}
    letters = sorted({letter for text in CORPUS for letter in text.replace(" ", "▁")} - {"\n"})
    vocab |= {letter: len(vocab) + number for number, letter in enumerate(letters)}
    merges = [("▁", "a"), ("▁", "r"), ("▁", "▁"), ("▁▁", "▁▁"), ("a", "n"), ("▁a", "n"), ("▁an", "d")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(replaced)
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    made.add_special_tokens(names)
    return made


def write(place: Path, made: tokenizers.Tokenizer, settings: dict[str, Any], **files: dict[str, Any]) -> Path:
    """A directory with a tokenizer, its ``tokenizer_config.json`` and further files of JSON by name."""
    place.mkdir(parents=True, exist_ok=True)
    made.save(str(place / "tokenizer.json"))
    for name, values in {"tokenizer_config": settings, **files}.items():
        (place / f"{name}.json").write_text(json.dumps(values))
    return place
