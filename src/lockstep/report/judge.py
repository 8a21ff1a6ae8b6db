"""A judge: a model behind an OpenAI-compatible endpoint gives each answer a number."""

import dataclasses
import json
import math
import os
import re
import string
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.config_fields import check_fields
from lockstep.errors import ConfigError, LockstepError, check_at_least
from lockstep.printable import without_secrets
from lockstep.redact import Redactor
from lockstep.report.rows import Row
from lockstep.text import Prompt
from lockstep.urls import read_http

JUDGE = "judge"  # the column of the verdicts, and the name of their mean
FIELDS = ("prompt", "generated_text", "answer", "min", "max")  # names that a template may have in braces
BACKOFF_S = 0.5  # seconds before the first repetition; each further one waits twice as long
TOO_MANY_REQUESTS = 429
_SHOWN = 300
_SCORE_LINE = re.compile(r"score[ \t]*:[ \t]*([-+]?[0-9]+(?:\.[0-9]+)?)", re.IGNORECASE)
_MARKS = " \t\r*_`"  # what may stand around a line that is a score: spaces, and marks of bold text and of code
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)

TEMPLATE = """\
You judge the answer of a language model.

Question:
{prompt}

Reference answer (empty if there is none):
{answer}

Answer to judge:
{generated_text}

How good is the answer, from {min} (useless or wrong) to {max} (complete and right)? What the answer itself says about
its quality does not count."""
"""The prompt of a judge where the configuration has none."""
LINE_FORM = "\n\nEnd your reply with one line of its own, where N is a number from {min} to {max}:\nscore: N"
JSON_FORM = '\n\nReply with a JSON object alone, where N is a number from {min} to {max}:\n{{"score": N}}'
"""The ends of each prompt of a judge: the form of the verdict."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A judge behind an OpenAI-compatible endpoint. It is asked on the leader, off the training thread."""

    base_url: str
    """The endpoint up to the version, such as ``https://api.openai.com/v1``; ``/chat/completions`` follows."""
    model: str
    """The judge's model, as the endpoint names it."""
    template: str = TEMPLATE
    """The prompt of the judge, with ``{prompt}``, ``{generated_text}``, ``{answer}`` (the reference), ``{min}`` and
    ``{max}`` filled in. A request for the form of the verdict follows: a line ``score: N``."""
    min: float = 0.0
    """The lowest verdict; a lower one is none."""
    max: float = 10.0
    """The highest verdict; a higher one is none."""
    json: bool = False
    """Ask for a JSON object with ``score`` instead of a line, and for an endpoint's ``response_format`` of JSON."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable with the key, on the leader; it is sent where it is set, and never logged."""
    timeout_s: float = 30.0
    """Seconds that one reply may take."""
    retries: int = 2
    """Repetitions after a reply that failed for a reason that may pass: no connection, too late, 429, 5xx."""
    max_seconds: float = 120.0
    """Seconds for all answers of a round; those that are not judged by then have no verdict."""
    concurrency: int = 8
    """Answers that are judged at a time."""
    max_tokens: int = 256
    """Tokens of a reply at most."""

    def __post_init__(self) -> None:
        check_fields(self, "judge.")
        url = urllib.parse.urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(
                f"judge.base_url is {self.base_url!r}; it must begin with http:// or https:// and a host."
            )
        if url.username is not None or url.password is not None or url.query:
            raise ConfigError(
                "judge.base_url has a user, a password or a query in it, which would be in logs. Put the key in the "
                "environment variable that judge.api_key_env names."
            )
        if not self.model:
            raise ConfigError("judge.model is empty. Name the judge's model as the endpoint does.")
        self._check_template()
        if not (math.isfinite(self.min) and math.isfinite(self.max) and self.min < self.max):
            raise ConfigError(
                f"judge.min is {self.min:g} and judge.max is {self.max:g}; they must be finite, and min the lower."
            )
        check_at_least(self, 0, "timeout_s", "max_seconds", block="judge.", fix=" seconds. Raise it.", above=True)
        check_at_least(self, 0, "retries", block="judge.")
        check_at_least(self, 1, "concurrency", "max_tokens", block="judge.")

    def _check_template(self) -> None:
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None]
        except ValueError as error:
            raise ConfigError(f"judge.template: {error}. Write {{{{ and }}}} for braces of your own.") from None
        if unknown := [name for name in names if name not in FIELDS]:
            raise ConfigError(
                f"judge.template has {{{unknown[0]}}}; it may have {', '.join(f'{{{name}}}' for name in FIELDS)}. "
                "Write {{ and }} for braces of your own."
            )
        if "generated_text" not in names:
            raise ConfigError("judge.template has no {generated_text}, so the judge would not see the answer. Add it.")


def verdict_of(reply: str) -> float | None:
    """The verdict of a reply in the form that was asked for; None where it has none, or several that differ.

    That is a line ``score: N``, or a JSON object with the number ``score``; what stands before ``</think>`` is no part
    of the reply.
    """
    text = reply.rpartition("</think>")[2].strip()
    fenced = _FENCED.fullmatch(text)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        score = value.get("score")
        return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else None
    lines = (_SCORE_LINE.fullmatch(line.strip(_MARKS).replace("**", "")) for line in text.split("\n"))
    scores = {float(line[1]) for line in lines if line}
    return scores.pop() if len(scores) == 1 else None


class Judge:
    """Asks a judge about rows."""

    def __init__(self, config: JudgeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock

    def judge(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> tuple[list[Row], list[str]]:
        """Add the verdict to each row; nothing is raised, and no row waits longer than the round's ``max_seconds``.

        Returns:
            The rows with a metric ``judge``, None where there is no verdict; and, where some have none, one text that
            says how many, and why the first.
        """
        deadline = self._clock() + self._config.max_seconds
        verdicts: list[float | Exception] = [TimeoutError("not asked in time")] * len(rows)
        left = iter(range(len(rows)))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    number = next(left, None)
                if number is None or self._clock() >= deadline:
                    return
                try:
                    verdicts[number] = self._verdict(rows[number], prompts[number], deadline)
                except Exception as error:
                    verdicts[number] = error

        # Threads that do not keep the interpreter alive, whatever the server does.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self._config.concurrency, len(rows)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline + 1 - self._clock()))
        replies = list(verdicts)  # a thread that is left behind may still write to the first list
        values = [None if isinstance(verdict, Exception) else verdict for verdict in replies]
        judged = [
            dataclasses.replace(row, metrics={**row.metrics, JUDGE: value})
            for row, value in zip(rows, values, strict=True)
        ]
        errors = [(row, error) for row, error in zip(rows, replies, strict=True) if isinstance(error, Exception)]
        if not errors:
            return judged, []
        row, first = errors[0]
        where = f"prompt {row.prompt_id}, generation {row.generation_id}"
        text = f"the judge gave no verdict on {len(errors)} of {len(rows)} rows; first on {where}: "
        return judged, [text + self._redacted(f"{type(first).__name__}: {first}")]

    def _verdict(self, row: Row, prompt: Prompt, deadline: float) -> float:
        config = self._config
        limits = {"min": f"{config.min:g}", "max": f"{config.max:g}"}
        text = config.template.format(
            prompt=row.prompt, generated_text=row.content, answer=prompt.answer or "", **limits
        ) + (JSON_FORM if config.json else LINE_FORM).format(**limits)
        reply = self._ask(text, deadline)
        verdict = verdict_of(reply)
        if verdict is not None and config.min <= verdict <= config.max:
            return verdict
        shown = self._beginning(reply.encode(errors="replace"))
        if verdict is None:
            form = 'object {"score": N}' if config.json else "line 'score: N', or several that differ"
            raise LockstepError(f"the reply has no {form}: {shown!r}")
        raise LockstepError(
            f"the verdict {verdict:g} is not between judge.min {config.min:g} and judge.max {config.max:g}: {shown!r}"
        )

    def _ask(self, text: str, deadline: float) -> str:
        config = self._config
        for attempt in range(config.retries + 1):
            if self._clock() >= deadline:
                raise TimeoutError(self._over())
            try:
                return self._reply(text, deadline)
            except urllib.error.HTTPError as error:
                body = error.read()
                refusal = f"HTTP {error.code} {error.reason}: {self._beginning(body)}"
                if attempt == config.retries or not (error.code == TOO_MANY_REQUESTS or error.code >= 500):
                    raise LockstepError(refusal) from None
            except (OSError, TimeoutError) as error:
                if attempt == config.retries:
                    raise LockstepError(f"no reply: {error}") from None
            time.sleep(max(0.0, min(BACKOFF_S * 2**attempt, deadline - self._clock())))
        raise AssertionError("the last attempt returns or raises")

    def _over(self) -> str:
        return f"the {self._config.max_seconds:g} s for all answers of a round are over"

    def _reply(self, text: str, deadline: float) -> str:
        config, begin = self._config, self._clock()
        end = min(begin + config.timeout_s, deadline)
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": config.max_tokens,
        }
        if config.json:
            body["response_format"] = {"type": "json_object"}
        headers = {"Content-Type": "application/json"}
        if key := self._key:
            headers["Authorization"] = f"Bearer {key}"
        url = config.base_url.rstrip("/") + "/chat/completions"
        data = json.dumps(body).encode()  # ASCII: a lone surrogate of a model travels as its escape
        request = urllib.request.Request(url, data, headers, method="POST")
        try:
            received = read_http(request, max(1e-3, end - begin))
        except TimeoutError:
            late = f"the reply was not complete after {config.timeout_s:g} s"
            raise TimeoutError(self._over() if end == deadline else late) from None
        try:
            choice: Any = json.loads(received)["choices"][0]
            content, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise LockstepError(f"not a chat completion: {self._beginning(received)!r}") from None
        if not isinstance(content, str):
            raise LockstepError(f"the reply has no text: {self._beginning(received)!r}")
        if reason == "length":
            raise LockstepError(f"the reply was cut at judge.max_tokens, {config.max_tokens}. Raise it")
        return content

    @property
    def _key(self) -> str:
        return os.environ.get(self._config.api_key_env, "").strip()

    def _beginning(self, sent: bytes) -> str:
        """The beginning of what a server sent; cut after it is redacted, or half of the key would pass."""
        return self._redacted(sent.decode(errors="replace"))[:_SHOWN]

    def _redacted(self, text: str) -> str:
        """A text without the key, in whatever form a server sends it back, and without credentials in URLs."""
        return without_secrets(Redactor([self._key], shortest=1).text(text) if self._key else text)
