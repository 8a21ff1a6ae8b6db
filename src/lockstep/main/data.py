"""``lockstep data --check``: the examples that a run would train on, looked at without one."""

import argparse
import dataclasses
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lockstep.errors import ConfigError
from lockstep.main.arguments import CONFIG_PATH
from lockstep.main.commands import Arguments, planned_commands
from lockstep.main.prepare import read_plan
from lockstep.printable import print_lines, show_log, without_credentials, write_to_stdout
from lockstep.terminal import Console
from lockstep.text import load_tokenizer, stop_ids
from lockstep.training import TrainConfig, TrainGrpoConfig
from lockstep.training.data import DataConfig, LmDataConfig, PreferenceDataConfig
from lockstep.training.data.chunk_builder import BATCH_RECORDS, CacheSpec, fit_records, place
from lockstep.training.data.example_check import ExampleCheck, print_examples
from lockstep.training.data.examples import FORMATS, DataFormat, Example
from lockstep.training.data.records import BadRow, list_files, read_piece
from lockstep.training.run.initial_model import model_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Examples = Iterable[tuple[str, Example | BadRow | None]]
"""The place of each record, and its example; what is wrong with it; or None where its prompt fills a row."""

KNOWN: Final = ("chat", "preference", "unpaired_preference", "prompt_completion", "text")
"""The formats that files are told to have by the fields of their first record; the first that fits it decides."""
UNLIMITED: Final = 2**30  # tokens of a row where nothing is cut
SHOWN_BAD: Final = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command is given."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="files to look at (default: those of the run)")
    parser.add_argument("--check", action="store_true", help="look at the examples; required")
    parser.add_argument("--tokenizer", metavar="NAME", help="a directory or a name; its chat template is used")
    parser.add_argument("--format", metavar="NAME", help="the format of FILE (default: by the fields of a record)")
    parser.add_argument("--max_seq_len", type=int, metavar="N", help="cut examples at N tokens (default: as the run)")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="look at the first N records of each source (default: all)"
    )
    parser.add_argument(
        "--command", choices=list(planned_commands()), help="whose configuration it is, where not clear"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RunData:
    """The data of a run, as its first step would see it."""

    data: DataConfig
    tokenizer: "PreTrainedTokenizerBase"
    ends: Sequence[int]  # the token ids that generation stops at
    length: int  # tokens of a row
    seed: int
    examples: Examples


def run_data(arguments: Sequence[str]) -> int:
    """Check as the command line says; 1 where a run on the data would be refused, else 0."""
    own, keys = _split(arguments)
    if not own.check:
        raise ConfigError(
            "lockstep data does nothing without --check. Write lockstep data --check FILE --tokenizer NAME."
        )
    show_log(logging.WARNING)
    run = _of_config(own, keys) if CONFIG_PATH in keys else _of_files(own, keys)
    length = run.length if run.data.truncate else None
    check = ExampleCheck(run.tokenizer, run.ends, kind=run.data.example_kind, length=length, seed=run.seed)
    bad, n_bad, without_room = list[str](), 0, 0
    console = Console()
    with console.status("reading") as status:
        for where, example in run.examples:
            if isinstance(example, BadRow):
                n_bad += 1
                bad += [f"  {where} {example}"] if n_bad <= SHOWN_BAD else []
            elif example is None:
                without_room += 1
            else:
                check.add(where, example)
            if check.examples % BATCH_RECORDS == 0:
                status.update(f"{check.examples:,} examples")
    lines = [check.summary("all records" if own.rows is None else f"the first {own.rows:,} records of each source")]
    lines += check.problems()
    if without_room:
        lines.append(f"training data: {without_room:,} examples are left out: their prompts fill {length} tokens")
    lines += [f"training data: {n_bad:,} records cannot be used:", *bad] if bad else []
    refused = [f"a run is refused: {line}" for line in _refusals(run.data, check, n_bad)]
    write_to_stdout(lambda: print_examples(check, console))
    print_lines(without_credentials("\n".join([*lines, *refused])))
    return 1 if refused else 0


def _refusals(data: DataConfig, check: ExampleCheck, n_bad: int) -> Iterator[str]:
    """The reasons for which a run on the data would end before its first step."""
    if not check.examples:
        yield "there is no example."
    if n_bad > (0 if data.on_bad_row == "raise" else data.max_bad_rows):
        yield f"{n_bad:,} records cannot be used (data.on_bad_row, data.max_bad_rows)."
    wrong = check.no_end()
    if wrong is not None and data.require_end_token:
        yield wrong


def _of_config(own: argparse.Namespace, keys: Mapping[str, str]) -> _RunData:
    """The data of a run's configuration."""
    values = dict(keys)
    for option, key in (("tokenizer", "tokenizer"), ("format", "data.format"), ("max_seq_len", "data.max_seq_len")):
        if getattr(own, option) is not None:
            values[key] = str(getattr(own, option))
    if own.files:
        values["data.train_urls"] = json.dumps(own.files)
    command, config = read_plan(own.command, [f"--{key}={value}" for key, value in values.items()])
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"the configuration is one of {command.name}, which trains on no data. Name that of a run.")
    tokenizer = config.read_tokenizer()
    model, vocab_size = model_shape(config, tokenizer)
    ends = config.inference_eval.sampling_params(stop_ids(tokenizer)).stop_token_ids
    data, seed = config.data, config.trainer.seed
    if isinstance(config, TrainGrpoConfig):
        questions = config.load(tokenizer, model.max_seq_len, seed, vocab_size=vocab_size)
        examples: Examples = questions.examples(own.rows or len(questions))
    else:
        examples = _read_examples(data.specs(tokenizer, model.max_seq_len, vocab_size), tokenizer, own.rows)
    length = data.row_length(model.max_seq_len)
    return _RunData(data=data, tokenizer=tokenizer, ends=ends, length=length, seed=seed, examples=examples)


def _of_files(own: argparse.Namespace, keys: Mapping[str, str]) -> _RunData:
    """Files with nothing but a tokenizer."""
    own_keys = dict(keys)
    trusted = own_keys.pop("trust_remote_code", None)
    if own_keys:
        raise ConfigError(f"--{next(iter(own_keys))} is a key of a configuration. Name that: --{CONFIG_PATH} FILE.")
    if not own.files or own.tokenizer is None:
        raise ConfigError(
            f"lockstep data --check needs --{CONFIG_PATH}, or files and their tokenizer. Write lockstep data --check "
            "FILE --tokenizer NAME."
        )
    length = own.max_seq_len or UNLIMITED
    name = own.format or _format_of(own.files[0])
    cls = PreferenceDataConfig if DataFormat.find(name).preferences else LmDataConfig
    data = cls(train_urls=tuple(own.files), format=name, truncate=own.max_seq_len is not None)
    tokenizer = load_tokenizer(own.tokenizer, trust_remote_code=trusted)
    examples = _read_examples(data.specs(tokenizer, length), tokenizer, own.rows)
    return _RunData(data=data, tokenizer=tokenizer, ends=stop_ids(tokenizer), length=length, seed=0, examples=examples)


def _format_of(url: str) -> str:
    """The format that the first record of a file has."""
    file = list_files(url, "FILE")[0]
    path, bad = without_credentials(file.path), None
    for line, _, record in read_piece(file, 0, 1, ()):
        if isinstance(record, Mapping):
            break
        bad = bad or (record and f"{place(path, 0, line)} {record}")
    else:
        raise ConfigError(str(bad))
    for name in KNOWN:
        if record.keys() >= set(FORMATS[name].fields):
            return name
    raise ConfigError(
        f"the first record of {path} has the fields {sorted(record)}, which are those of no "
        f"format ({', '.join(KNOWN)}). Say which with --format, or name the run's configuration with --{CONFIG_PATH}."
    )


def _read_examples(specs: Sequence[CacheSpec], tokenizer: "PreTrainedTokenizerBase", limit: int | None) -> Examples:
    """The examples of files, as a run's cache would have them."""
    for spec in specs:
        left = limit
        for file in spec.files:
            fields = (*spec.format.fields, *spec.format.optional)
            records = itertools.islice(read_piece(file, 0, 1, fields, spec.max_line_bytes), left)
            for batch in itertools.batched(records, BATCH_RECORDS):
                left = None if left is None else left - len(batch)
                for line, example in fit_records(spec, tokenizer, batch):
                    yield place(file.path, 0, line), example


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The options of the command itself, and the keys of the run's configuration."""
    parser = Arguments("data", add_options)
    names = {action.dest for action in parser._actions if action.option_strings}
    own: list[str] = []
    keys: dict[str, str] = {}
    todo = list(arguments)
    while todo:
        word = todo.pop(0)
        if word == "--check" or not word.startswith("--"):
            own.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not todo or todo[0].startswith("--"):
                raise ConfigError(f"argument --{name} has no value. See lockstep data --help.")
            value = todo.pop(0)
        if name in names:
            own.append(f"--{name}={value}")
        else:
            keys[name] = value
    return parser.parse_args(own), keys
