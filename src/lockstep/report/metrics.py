"""Metrics: functions of a row and its prompt that give a number; the fields of a configuration that choose them."""

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.config_fields import FilePath
from lockstep.errors import ConfigError, LockstepError
from lockstep.limits import PROMPT_LINE_BYTES
from lockstep.plugins import go_back, load_object, own_error_text, working_directory
from lockstep.printable import get_logger
from lockstep.report.answers import Pattern, final_text, last_number, same_number
from lockstep.report.rows import COLUMNS, FILE_COLUMNS, SAMPLE_COLUMNS, Row, SampleRow, TableRow, metric_names
from lockstep.text import Prompt, PromptFields, PromptFormat, iter_prompts, split_answer

log = get_logger(__name__)

type AnyRow = Row | SampleRow
"""A row of a training run or of ``lockstep sample``; a metric may read what both have."""
type Metric = Callable[[AnyRow, Prompt], float | None]
"""A function of a row and its prompt that returns a number, or None where there is none."""

_NGRAM = 4
_DIGITS = 4
"""The number of significant digits of the perplexity; further ones depend on how the model is split over devices."""


def content(row: AnyRow) -> str:
    """The final answer of a row, without the reasoning before it; of an object that has its text alone, by the markers
    in that.
    """
    return row.content if hasattr(row, "content") else split_answer(row.generated_text).content


def exact_match(row: AnyRow, prompt: Prompt, *, ignore_case: bool = False) -> float | None:
    """1 where the final answer (`content`) is that of the prompt as text, but for space around it; else 0.

    After a ``####``, as in GSM8K, the rest of that line counts. Without, the first lines count, as many as the prompt's
    answer has.
    """
    if prompt.answer is None:
        return None
    expected = final_text(prompt.answer)
    answer = final_text(content(row), lines=expected.count("\n") + 1)
    return float(answer.casefold() == expected.casefold() if ignore_case else answer == expected)


def gsm8k(row: AnyRow, prompt: Prompt) -> float | None:
    r"""1 where the final answer (`content`) ends in the number of the prompt's answer, as in GSM8K; else 0.

    The number of either text is the one after the last ``####`` that one follows, else in the last ``\boxed{}``, else
    the last number in it (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168). Numbers are compared by value, without
    units: 1,200.0 is 1200, and 1{,}200\text{ m}^2 too.

    Raises:
        LockstepError: The prompt's answer has no number.
    """
    if prompt.answer is None:
        return None
    expected = last_number(prompt.answer)
    if expected is None:
        raise LockstepError(f"the answer of prompt {prompt.id}, {prompt.answer!r}, has no number. Correct the answer.")
    return float(same_number(last_number(content(row)), expected))


def math_verify(row: AnyRow, prompt: Prompt) -> float | None:
    """1 where the completion's mathematical expression equals that of the prompt's answer, else 0.

    Both are read and compared by math-verify (https://github.com/huggingface/Math-Verify): fractions, roots, sets,
    equations, in LaTeX or plain. It needs the extra ``math``, and has no time limit of its own here.

    Raises:
        LockstepError: The prompt's answer has no expression.
    """
    if prompt.answer is None:
        return None
    import math_verify as library

    expected = math_expressions(prompt.answer)
    if not expected:
        raise LockstepError(
            f"the answer of prompt {prompt.id}, {prompt.answer!r}, has no mathematical expression. Correct the answer."
        )
    # Its own limits are alarm signals, which only the main thread of a process can have.
    return float(library.verify(expected, library.parse(content(row), parsing_timeout=None), timeout_seconds=None))


def math_expressions(answer: str) -> list[Any]:
    """The expressions that math-verify reads in a reference answer, which may be LaTeX without ``$`` around it."""
    import math_verify as library

    for text in (answer, f"${answer}$"):
        expressions: list[Any] = library.parse(text, parsing_timeout=None)
        if not all(isinstance(expression, str) for expression in expressions):  # a text is what it could not read
            return expressions
    return []


def length(row: AnyRow, prompt: Prompt) -> float:
    """The number of tokens of the completion."""
    return float(row.num_tokens)


def repetition(row: AnyRow, prompt: Prompt) -> float:
    """The share of the completion's runs of four words that occur before in it: 0 for none, towards 1 for a loop."""
    words = row.generated_text.split()
    runs = [tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def perplexity(row: AnyRow, prompt: Prompt) -> float | None:
    """The perplexity of the completion: the exponential of the mean negative log-probability per token; None without
    tokens.

    The probabilities are those of the model at temperature 1. The value has four digits, of which the last may differ
    between layouts.
    """
    return float(f"{math.exp(min(-row.mean_logprob, 700.0)):.{_DIGITS}g}") if row.num_tokens else None


BUILT_IN: Mapping[str, Metric] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "math_verify": math_verify,
    "length": length,
    "repetition": repetition,
    "perplexity": perplexity,
}
_COMPARING = ("exact_match", "gsm8k", "math_verify")  # metrics that have no value without a reference answer
OPEN_METRICS: Mapping[str, Metric] = {name: metric for name, metric in BUILT_IN.items() if name not in _COMPARING}
"""The metrics that need no reference answer."""
_REGEX = "regex="
_TAKEN = {*COLUMNS, *SAMPLE_COLUMNS, *FILE_COLUMNS}
SCALARS = frozenset(
    "samples report_errors dropped_reports skipped_rounds skipped_task_rounds num_prompts num_completions "
    "unfinished_completions generated_tokens tokens_per_second logprob_gap logprob_noise logprob_gap_mean "
    "logprob_noise_mean total_prompts total_generated_tokens num_hosts inference_mode total_completions "
    "resumed_completions load_bytes_per_second".split()
)
"""The names beside those of columns under which a tracker gets what is no metric, without the prefix."""


def load_metric(name: str) -> Metric:
    """Find a metric by name.

    Args:
        name: ``exact_match``, ``gsm8k``, ``math_verify``, ``length``, ``repetition``, ``perplexity``,
            ``regex=PATTERN`` (1 where the pattern is in the final answer), or ``module:function`` of an importable
            module.

    Raises:
        ConfigError: There is no such metric.
    """
    if name == math_verify.__name__:
        _check_math_verify()
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(_REGEX):
        return _regex(name)
    _check_name(name)
    metric: Metric = load_object(name, "metric")
    return metric


def _check_math_verify() -> None:
    try:
        import math_verify as library  # noqa: F401 - whether it can be imported is the question
    except ImportError as error:
        raise ConfigError(
            f"math_verify needs math-verify, which cannot be imported ({error}). Install it with "
            "pip install 'jax-lockstep[math]' on every host, or use gsm8k."
        ) from error
    # Each call without a time limit would warn of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def load_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Find several metrics; modules of the user's are imported.

    Returns:
        The functions by their columns. A column is the name itself; for ``module:function`` it is the part after the
        colon, and for regular expressions ``regex``, ``regex_2`` and so on.

    Raises:
        ConfigError: There is no such metric, or its column or number is there already.
    """
    return {column: load_metric(name) for column, name in _columns(names).items()}


def check_metrics(names: Iterable[str], taken: Collection[str] = ()) -> None:
    """Check the names of metrics as far as that is possible without running a module of the user's.

    Raises:
        ConfigError: A name cannot be that of a metric, or its column or number is there already.
    """
    for name in _columns(names, taken).values():
        if name in BUILT_IN or name.startswith(_REGEX):
            load_metric(name)
        else:
            _check_name(name)


def _columns(names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """The names of metrics by their columns."""
    columns: dict[str, str] = {}
    for name in names:
        column = "regex" if name.startswith(_REGEX) else name.rpartition(":")[2]
        if column == "regex" and column in columns:
            column = f"regex_{sum(known.startswith('regex') for known in columns) + 1}"
        if column in columns or column in _TAKEN or column in taken:
            raise ConfigError(f"metric {name!r}: the table already has a column {column!r}. Rename or remove it.")
        if column in SCALARS:
            raise ConfigError(f"metric {name!r}: {column!r} is a number that is logged anyway. Rename or remove it.")
        columns[column] = name
    return columns


def _check_name(name: str) -> None:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(
            f"metric {name!r} is not known. Use {', '.join(BUILT_IN)}, regex=PATTERN, or module:function for your own."
        )


def as_number(value: Any) -> float:
    """Return the value of a metric or a reward.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite.
    """
    if not isinstance(value, str | bytes) and hasattr(value, "__float__") and not np.iscomplexobj(value):
        with contextlib.suppress(TypeError):  # an array of several numbers
            if math.isfinite(number := float(value)):
                return number
            raise ValueError(f"returned {number}, which is not finite")
    raise TypeError(f"returned {value!r:.200}, which is not a number")


def measure[R: AnyRow](
    metrics: Mapping[str, Metric],
    rows: Sequence[R],
    prompts: Sequence[Prompt],
    guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[list[R], list[str]]:
    """Apply metrics to rows. A metric that fails on a row leaves that cell empty.

    Args:
        guard: A function that makes a context around each call of a metric.

    Returns:
        The rows with their values added, None where there is none; and for each metric that failed, on how many rows,
        and how on the first of them.
    """
    measured, errors, directory = [], dict[str, list[str]](), working_directory()
    for row, prompt in zip(rows, prompts, strict=True):
        values = dict(row.metrics)
        for column, metric in metrics.items():
            try:
                with guard():
                    value = metric(*copy.deepcopy((row, prompt)))  # what it changes in them is nobody else's
                values[column] = None if value is None else as_number(value)
            except (Exception, SystemExit) as error:  # a metric is the user's own code
                values[column] = None
                where = f"prompt {row.prompt_id}, generation {row.generation_id}"
                errors.setdefault(column, []).append(f"{where}: {own_error_text(error)}")
        measured.append(dataclasses.replace(row, metrics=values))
    go_back(directory, "a metric")
    failures = [
        f"metric {column!r} failed on {len(texts)} of {len(rows)} rows, which have no value; first on {texts[0]}"
        for column, texts in errors.items()
    ]
    return measured, failures


def _regex(name: str) -> Metric:
    try:
        pattern = Pattern(name.removeprefix(_REGEX), multiline=True)
    except ConfigError as error:
        raise ConfigError(f"metric {name!r}: {error}") from None
    return lambda row, prompt: float(pattern.is_in(content(row)))


def metric_means(rows: Iterable[TableRow]) -> dict[str, float]:
    """The mean of each metric over the rows that have a value, by the metric's name; without any there is no mean."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def pass_rates(rows: Sequence[Row]) -> dict[str, float]:
    """The share of prompts that one answer, and that any of ``k`` answers, solves: ``pass@1/NAME``, ``pass@k/NAME``.

    They are for metrics whose values are all 0 or 1, where every prompt has ``k`` answers, more than one; with as many
    answers as ``k`` that is the unbiased estimate (Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1).
    Both are over the prompts all of whose answers have a value: with fewer than ``k`` there is no such estimate of
    ``pass@k``, and one of ``pass@1`` alone would be of other prompts.
    """
    rates: dict[str, float] = {}
    for name in metric_names(rows):
        groups: dict[int, list[float | None]] = {}
        for row in rows:
            groups.setdefault(row.prompt_id, []).append(row.metrics.get(name))
        sizes = {len(values) for values in groups.values()}
        values = {value for scores in groups.values() for value in scores}
        scored = [
            solved for scores in groups.values() if len(solved := [v for v in scores if v is not None]) == len(scores)
        ]
        if scored and len(sizes) == 1 and (k := sizes.pop()) > 1 and values <= {0.0, 1.0, None}:
            rates[f"pass@1/{name}"] = sum(map(sum, scored)) / (k * len(scored))
            rates[f"pass@{k}/{name}"] = sum(1.0 in scores for scores in scored) / len(scored)
    return rates


@functools.cache
def _warn_of_answers(metrics: str, field: str, fields: str) -> None:
    log.warning(
        "metrics has %s, and no prompt has an answer to compare with: there will be no value. The field of answers is "
        "%r (answer_field); the further fields of the last prompt: %s. Set answer_field, or leave the metric out.",
        metrics,
        field,
        fields,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationFields:
    """The prompts, the metrics and the table, which ``inference_eval`` and ``sample`` have in common."""

    prompts: list[dict[str, Any] | str] | FilePath = dataclasses.field(default_factory=list)
    """A list of texts, ``{prompt, answer}`` or ``{messages, answer}``, or a .txt, .jsonl, .csv, .tsv or .parquet file
    (local or URL)."""
    prompt_format: PromptFormat | None = None
    """``chat``: a prompt that is a text is the user's message, through the tokenizer's chat template. ``text``: the
    model goes on from it. Null: as ``text``, with a warning where the tokenizer has a template and no prompt is a chat.
    """
    prompt_field: str = "prompt"
    """The field of a .jsonl line with the prompt, a text. Fields with no name here go through to the rows."""
    messages_field: str = "messages"
    """The field of a .jsonl line with the messages of a chat, a list of ``{role, content}``."""
    answer_field: str = "answer"
    """The field of a .jsonl line with the reference answer."""
    max_line_bytes: int = PROMPT_LINE_BYTES
    """The most bytes of a line of the file of prompts; a longer one is an error, and is not read whole."""
    metrics: list[str] = dataclasses.field(default_factory=list)
    """Numbers per completion, and their means: ``exact_match``, ``gsm8k``, ``math_verify``, ``regex=PATTERN``,
    ``length``, ``repetition``, ``perplexity``, or ``module:function`` of (row, prompt) -> float or None (no value)."""
    health: bool = True
    """Look at the health of every answer: loops, markers of templates, empty answers and others (docs/health.md)."""
    skip_samples_table: bool = False
    """No table of rows in the tracker and none at the terminal; the scalars are logged."""

    def stream_prompts(self) -> Iterator[Prompt]:
        """The prompts one by one; a warning, once, where a metric compares with answers and no prompt has one."""
        answered, fields = False, list[str]()
        for prompt in iter_prompts(self.prompts, self.prompt_fields, self.max_line_bytes):
            answered, fields = answered or prompt.answer is not None, list(prompt.fields)
            yield prompt
        if (comparing := [name for name in self.metrics if name in _COMPARING]) and not answered:
            _warn_of_answers(", ".join(comparing), self.answer_field, ", ".join(fields) or "none")

    @property
    def prompt_fields(self) -> PromptFields:
        """The names of the fields of a prompt, and its format."""
        return PromptFields(
            prompt=self.prompt_field, messages=self.messages_field, answer=self.answer_field, format=self.prompt_format
        )
