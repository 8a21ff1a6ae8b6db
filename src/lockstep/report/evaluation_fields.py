"""The fields of a configuration that say what is asked and what is made of the completions."""

import dataclasses
from typing import Any

from lockstep.text import MAX_LINE_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationFields:
    """The prompts, the metrics and the table, which ``inference_eval`` and ``sample`` have in common."""

    prompts: list[dict[str, Any] | str] | str = dataclasses.field(default_factory=list)
    """A list of texts, ``{prompt, answer}`` or ``{messages, answer}``, or a .txt or .jsonl file (local or URL)."""
    max_line_bytes: int = MAX_LINE_BYTES
    """The most bytes of a line of the file of prompts; a longer one is an error, and is not read whole."""
    metrics: list[str] = dataclasses.field(default_factory=list)
    """Numbers per completion, and their means: ``exact_match``, ``gsm8k``, ``regex=PATTERN``, ``length``,
    ``repetition``, ``perplexity``, or ``module:function`` of (row, prompt) -> float or None (no value)."""
    skip_samples_table: bool = False
    """No table of rows in the tracker and none at the terminal; the scalars are logged."""
