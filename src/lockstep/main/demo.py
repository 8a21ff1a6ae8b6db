"""``lockstep demo``: a small model learns to spell numbers on this machine, and what it says is shown as it does."""

import argparse
import importlib.resources
import json
import random
import re
import shlex
import string
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from lockstep import exits
from lockstep.config_fields import option_path
from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.launch import main as launch
from lockstep.main.commands import Arguments
from lockstep.printable import print_lines
from lockstep.report import read_jsonl

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
    """Return the English words of a number from 0 to 9,999."""
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
    held_out = [pair for two in zip(*(kind[: HELD_OUT_ROWS // 2] for kind in kinds), strict=True) for pair in two]
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
    """Train a byte-pair encoding, each digit a token of its own, and write it for AutoTokenizer."""
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
    write_file(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    write_file(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    write_file(directory / "chat_template.jinja", CHAT_TEMPLATE)


def write_rows(rows: Iterable[Mapping[str, str]], path: Path) -> None:
    """Write one JSON object per line."""
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


KIND: Final = "in words"
"""The beginning that the questions of the demo share: numbers to spell, which a model learns faster than sums."""
PROMPTS: Final = 8  # the number of questions that the model answers while it learns


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given."""
    parser.add_argument("--steps", type=int, metavar="N", help="train steps (default: as demo.yaml says, 100)")
    parser.add_argument(
        "--processes", type=int, choices=(1, 2, 4), default=2, help="processes, with one device each (default: 2)"
    )
    parser.add_argument(
        "--directory",
        type=option_path,
        default=Path("lockstep-demo"),
        metavar="PATH",
        help="where everything goes (default: lockstep-demo)",
    )


def main(arguments: Sequence[str]) -> int:
    """Write what is missing, train, and say what to do next."""
    parser = Arguments("demo", add_options)
    options = parser.parse_args(list(arguments))
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    directory: Path = options.directory
    words = ["--backend", "local", "--processes", str(options.processes), "--devices_per_process", "1"]
    words += ["--", "lockstep", "train-lm", "--config_path", str(directory / "demo.yaml")]
    try:
        written = write_demo(directory, shlex.join(["lockstep", "launch", *words]))
    except OSError as error:
        raise ConfigError(f"{error}. Name a directory that can be written with --directory PATH.") from error
    print_lines(_introduction(directory, options.processes, written))
    run_id = time.strftime("%Y%m%d-%H%M%S")
    words += ["--trainer.log_dir", str(directory / "runs"), "--trainer.run_id", run_id]
    if options.steps is not None:
        words += ["--trainer.num_train_steps", str(options.steps)]
    code = launch(words)
    if code == exits.DONE:
        print_lines(closing(directory / "runs" / run_id))
    return code


def write_demo(directory: Path, command: str) -> bool:
    """Write configuration and data of the demo, unless they are there; whether they were written."""
    config = directory / "demo.yaml"
    if config.exists():
        return False
    train, held_out = ([row for row in kind if KIND in row["prompt"]] for kind in split())
    files = {"train": directory / "train.jsonl", "prompts": directory / "prompts.jsonl"}
    tokenizer = directory / "tokenizer"
    write_tokenizer(train, tokenizer)
    write_rows(train, files["train"])
    write_rows(held_out[:PROMPTS], files["prompts"])
    text = (importlib.resources.files("lockstep.main") / "demo.yaml").read_text(encoding="utf-8")
    paths = {name: json.dumps(str(path)) for name, path in {**files, "tokenizer": tokenizer}.items()}
    write_file(config, string.Template(text).substitute(paths, command=command))
    return True


def _introduction(directory: Path, processes: int, written: bool) -> str:
    where = "one process" if processes == 1 else f"{processes} processes, as on a pod of {processes} hosts"
    state = "are written to" if written else "are already in"
    return (
        f"demo: a small Llama learns to spell numbers, on {where}. Every 20 steps\n"
        "demo: it answers questions that it is never trained on. What it says first is noise; ctrl-C ends it.\n"
        f"demo: configuration and data {state} {directory}\n"
    )


def closing(run_dir: Path) -> str:
    """The text that shows what the model has learnt, and what to do next."""
    rows = read_jsonl(run_dir / "samples.jsonl")
    right = {step: [row["exact_match"] for row in rows if row["step"] == step] for step in (0, rows[-1]["step"])}
    (_, before), (last, after) = right.items()
    directory, checkpoint = run_dir.parents[1], shlex.quote(str(run_dir / "checkpoint"))
    ask = "--max_new_tokens 12 --prompts '[\"What is 4321 in words?\"]'"
    next_steps = {
        "see every answer at every step, in a browser": f"lockstep report {shlex.quote(str(run_dir))}",
        "ask it something": f"lockstep sample --hf_checkpoint {checkpoint} {ask}",
        f"change {directory / 'demo.yaml'} (longer, another shape, your own data), and run it again": shlex.join(
            ["lockstep", "demo", "--directory", str(directory)]
        ),
        "see how such a run does on a TPU slice that you do not have yet": "lockstep plan --help",
        "see all commands": "lockstep --help",
    }
    return "\n".join(
        [
            "",
            f"demo: {sum(before):.0f} of {len(before)} answers were right before the first step, {sum(after):.0f} of "
            f"{len(after)} after step {last}.",
            "demo: in a training loop of your own this is lockstep.SampleCallback(config, tokenizer), after each step.",
            "next:",
            *(f"  {purpose}:\n    {command}" for purpose, command in next_steps.items()),
        ]
    )
