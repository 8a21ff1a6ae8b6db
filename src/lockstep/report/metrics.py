"""Metrics: a number per row, from the row and its prompt."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping

from lockstep.errors import ConfigError, LockstepError
from lockstep.report.rows import COLUMNS, Row
from lockstep.text.prompts import Prompt

type Metric = Callable[[Row, Prompt], float]
"""Takes a row and its prompt, returns a number."""


def exact_match(row: Row, prompt: Prompt) -> float:
    """1 where the first line of the answer is the prompt's answer, space around it aside; else 0.

    Raises:
        LockstepError: the prompt has no answer.
    """
    if prompt.answer is None:
        raise LockstepError(
            f"prompt {prompt.id} has no answer to compare with. Write it as {{prompt: …, answer: …}}, or remove "
            "exact_match from metrics."
        )
    first_line = row.generated_text.strip().split("\n")[0].strip()
    return float(first_line == prompt.answer.strip())


BUILT_IN: Mapping[str, Metric] = {"exact_match": exact_match}


def load_metric(name: str) -> Metric:
    """Find a metric by name.

    Args:
        name: ``exact_match``, or ``module:function`` of an importable module.

    Returns:
        The function.

    Raises:
        ConfigError: no such metric.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"metric {name!r} is not known. Use {', '.join(BUILT_IN)}, or module:function for your own.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the module's own code
        raise ConfigError(
            f"metric {name!r}: module {module_name!r} could not be imported ({type(error).__name__}: {error}). Check "
            "the name, and that its directory is on PYTHONPATH on every host."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"metric {name!r}: module {module_name!r} has no function {function_name!r}. Check the name.")
    return function


def load_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Find several metrics.

    Args:
        names: as for ``load_metric``.

    Returns:
        The functions by column: the name itself, of ``module:function`` the part after the colon.

    Raises:
        ConfigError: no such metric, or a column that is there already.
    """
    metrics: dict[str, Metric] = {}
    for name in names:
        column = name.rpartition(":")[2]
        if column in metrics or column in COLUMNS:
            raise ConfigError(f"metric {name!r}: the table already has a column {column!r}. Rename or remove it.")
        metrics[column] = load_metric(name)
    return metrics


def measure(metrics: Mapping[str, Metric], row: Row, prompt: Prompt) -> Row:
    """Apply metrics to a row.

    Args:
        metrics: functions by column, as returned by ``load_metrics``.
        row: what the model said.
        prompt: what it was asked.

    Returns:
        The row with their values added.

    Raises:
        LockstepError: a metric failed; names it, the prompt and the generation.
    """
    values = dict(row.metrics)
    for column, metric in metrics.items():
        try:
            values[column] = float(metric(row, prompt))
        except Exception as error:  # a metric is the user's own code
            raise LockstepError(
                f"metric {column!r} failed on prompt {row.prompt_id}, generation {row.generation_id}: "
                f"{type(error).__name__}: {error}"
            ) from error
    return dataclasses.replace(row, metrics=values)


def metric_means(rows: Iterable[Row]) -> dict[str, float]:
    """Mean of each metric over the rows that have it, by name."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}
