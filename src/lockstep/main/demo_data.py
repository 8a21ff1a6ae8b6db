"""The data of the demo: questions about numbers with answers in words, and a tokenizer for them.

The same bytes come out every time. All of the text is made here, from arithmetic and the English number words; it is
dedicated to the public domain (CC0-1.0).
"""

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

SEED: Final = 20
TRAIN_NUMBERS: Final = 3_000  # sums are the harder kind: all that are not held out are trained on
HELD_OUT_ROWS: Final = 32
VOCAB_SIZE: Final = 352
SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

UNITS: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS: Final = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(number: int) -> str:
    """Return the English words of a number.

    Args:
        number: The number, 0 to 9,999.
    """
    if number < 20:
        return UNITS[number]
    if number < 100:
        return TENS[number // 10] + ("-" + UNITS[number % 10] if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % unit
    return f"{UNITS[number // unit]} {name}" + (f" {words(rest)}" if rest else "")


def questions() -> list[tuple[str, str]]:
    """Return every question with its answer."""
    spelled = [(f"What is {number} in words?", words(number)) for number in range(100, 10_000)]
    sums = [(f"What is {a} plus {b}?", words(a + b)) for a in range(1, 100) for b in range(1, 100)]
    return spelled + sums


def split() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the training rows and the held-out rows, those of the two kinds by turns.

    No question is in both, and of a held-out sum the training rows have the other order (a plus b, b plus a) neither.
    """
    draw = random.Random(SEED)
    pairs = questions()
    draw.shuffle(pairs)
    kinds = [[pair for pair in pairs if word in pair[0]] for word in ("words", "plus")]
    held_out = [pair for both in zip(*(kind[: HELD_OUT_ROWS // 2] for kind in kinds), strict=True) for pair in both]
    hidden = {_numbers(question) for question, _ in held_out}
    numbers, sums = ([pair for pair in kind if _numbers(pair[0]) not in hidden] for kind in kinds)
    train = numbers[:TRAIN_NUMBERS] + sums
    draw.shuffle(train)
    return (
        [{"prompt": question, "completion": " " + answer} for question, answer in train],
        [{"prompt": question, "answer": answer} for question, answer in held_out],
    )


def _numbers(question: str) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in re.findall(r"\d+", question)))


def write_tokenizer(rows: Sequence[Mapping[str, str]], directory: Path) -> None:
    """Train a byte-pair encoding, each digit a token of its own, and write it for AutoTokenizer.

    Args:
        rows: The rows of training.
        directory: Where to write; made where it is not there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_rows(rows: Iterable[Mapping[str, str]], path: Path) -> None:
    """Write one JSON object per line.

    Args:
        rows: The rows.
        path: The file.
    """
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
