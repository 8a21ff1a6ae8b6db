"""The questions that answers are sampled to, and which of them a rollout has."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from lockstep.errors import ConfigError, PromptError
from lockstep.hosts import digest
from lockstep.plugins import load_object, own_error_text
from lockstep.printable import get_logger
from lockstep.report import Row
from lockstep.text import Prompt, encode, unknown_token
from lockstep.text.stop import AnswerDecoder
from lockstep.training.data import GrpoDataConfig
from lockstep.training.data.chats import make_prompt
from lockstep.training.data.examples import Example, TokenSequence
from lockstep.training.data.records import BadRow, Record, list_files, read_piece
from lockstep.training.rl.rewards import RewardConfig
from lockstep.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

ORDER_VERSION = 1
"""Grows with every change of what `Questions.drawn` returns, so that no run goes on from a checkpoint of another order.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """All questions of a run, tokenised; every host has the same."""

    prompts: Sequence[Prompt]  # the prompts, with the reference answer as `answer`
    tokens: Sequence[tuple[int, ...]]
    seed: int
    row_length: int  # the most tokens of a question with its answers
    shuffle: bool = True  # whether each epoch has an order of its own

    def __len__(self) -> int:
        """Return the number of questions of one epoch."""
        return len(self.prompts)

    def digest(self) -> str:
        """Return the SHA-256 of all questions and of their order, and its version, for hosts to agree on."""
        answers = [prompt.answer for prompt in self.prompts]
        first = self._order(0)[:64].tolist()  # another version of NumPy may shuffle otherwise
        further = [repr([sorted(prompt.fields.items()) for prompt in self.prompts])] * any(
            x.fields for x in self.prompts
        )
        parts = digest(f"{self.seed} {self.shuffle}", repr(self.tokens), repr(answers), repr(first), *further)
        return f"{parts} (version {ORDER_VERSION} of the order)"

    def examples(self, count: int) -> Iterator[tuple[str, Example]]:
        """Yield the first questions that the run draws, each with its number; all where there are no more."""
        for number in self.drawn(0, min(count, len(self))).tolist():
            tokens = self.tokens[number]
            yield f"question {number}", (TokenSequence(len(tokens), tokens),)

    def drawn(self, rollout: int, count: int, attempt: int = 0) -> Int[np.ndarray, " prompt"]:
        """Return which questions a rollout has: a function of seed and number alone.

        Args:
            attempt: The number of times that this rollout drew before. The first draw takes every question once per
                epoch; further ones are drawn at random from those that the rollout has not had, of which there must be
                as many (assertion).
        """
        if attempt:
            # A stream of its own: that of an epoch's order would draw what the next rollouts have.
            random = np.random.default_rng((self.seed, rollout, 1)).permutation(len(self))
            fresh = random[~np.isin(random, self.drawn(rollout, count))]
            assert len(fresh) >= attempt * count, "Rollouts refuses more attempts than there are questions"
            return fresh[(attempt - 1) * count : attempt * count]
        epochs, offsets = np.divmod(np.arange(rollout * count, (rollout + 1) * count), len(self))
        return np.concatenate([self._order(int(epoch))[offsets[epochs == epoch]] for epoch in np.unique(epochs)])

    def longest(self, count: int) -> list[int]:
        """Return the questions with the longest prompts, repeated where too few: no rollout needs more."""
        order = sorted(range(len(self)), key=lambda number: -len(self.tokens[number]))
        return [order[place % len(order)] for place in range(count)]

    def _order(self, epoch: int) -> Int[np.ndarray, " question"]:
        return _permutation(self.seed, epoch, len(self)) if self.shuffle else np.arange(len(self))


def load_questions(
    config: GrpoDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    row_length: int,
    max_new_tokens: int,
    seed: int,
    rewards: Sequence[RewardConfig] = (),
    own: Iterable[Prompt] | None = None,
    vocab_size: int | None = None,
) -> Questions:
    """Read and tokenise the questions.

    Args:
        own: Questions in place of those of the files, from an environment.
        row_length: The number of tokens of a question with its answer: ``data.max_seq_len``, or the model's.
        vocab_size: The number of rows of the model's embedding; None: the questions' tokens are not checked.
    """
    room = row_length - max_new_tokens
    prompts: list[Prompt] = []
    tokens: list[tuple[int, ...]] = []
    left_out = 0
    if own is not None and config.train_urls:
        raise ConfigError("the environment has questions of its own, and data.train_urls is given. Remove it.")
    for place, prompt in iter_questions(config, rewards) if own is None else _of_environment(own):
        try:
            (encoded,) = encode(tokenizer, [prompt])
        except PromptError as error:
            raise ConfigError(f"{place}: {error}") from error
        if vocab_size is not None and (unknown := unknown_token(tokenizer, encoded, vocab_size)):
            raise ConfigError(f"{place} {unknown}")
        if len(encoded) > room:
            if config.truncate:
                left_out += 1
                continue
            whole = len(encoded) + max_new_tokens
            bound = f"data.max_seq_len is {row_length}. Raise it to at least {whole},"
            if config.max_seq_len is None:
                bound = f"the model allows {row_length}. Shorten the prompt,"
            lower = f" lower rollout.max_new_tokens to at most {row_length - len(encoded)},"
            raise ConfigError(
                f"{place}: the prompt has {len(encoded)} tokens and rollout.max_new_tokens is {max_new_tokens}: "
                f"together {whole}, but {bound}{lower * (row_length > len(encoded))} or set data.truncate: true to "
                "leave out such questions."
            )
        prompts.append(dataclasses.replace(prompt, id=len(prompts)))
        tokens.append(encoded)
    if left_out:
        log.warning("truncate: %d questions left out, their prompts have more than %d tokens", left_out, room)
    if not prompts:
        source, fix = ("training data", "data.train_urls") if own is None else ("environment", "its questions()")
        fix += ", and raise data.max_seq_len" if left_out else ""
        raise ConfigError(f"the {source} has 0 questions that fit; at least 1 is needed. Check {fix}.")
    return Questions(prompts=prompts, tokens=tokens, seed=seed, row_length=row_length, shuffle=config.shuffle)


def _of_environment(prompts: Iterable[Any]) -> Iterator[tuple[str, Prompt]]:
    for number, prompt in enumerate(prompts):
        place = f"question {number} of the environment"
        if not isinstance(prompt, Prompt):
            raise ConfigError(
                f"{place} is {prompt!r:.200}; it must be a lockstep.text.Prompt. Correct its questions()."
            )
        yield place, prompt


def iter_questions(config: GrpoDataConfig, rewards: Sequence[RewardConfig] = ()) -> Iterator[tuple[str, Prompt]]:
    """Yield the place of each question, and the question as a prompt."""
    make = functools.partial(_prompt, config)
    if ":" in config.format:
        make = functools.partial(_prompt_of_function, load_object(config.format, "data.format"))
    if not config.train_urls:
        raise ConfigError("data.train_urls is empty; at least 1 file is needed. List files, e.g. [data/train.jsonl].")
    bad: list[str] = []
    numbers = itertools.count()
    for source in config.train_urls:
        for file in list_files(source if isinstance(source, str) else source.url, "data.train_urls"):
            for number, _, record in read_piece(file, 0, 1, (), config.max_line_bytes):
                place = f"{file.path}:{number}"
                try:
                    if record is None:
                        continue
                    if isinstance(record, BadRow):
                        raise record
                    prompt = make(record)
                    assert prompt.answer is not None
                    for reward in rewards:
                        reward.check_answer(prompt.answer)
                    yield place, dataclasses.replace(prompt, id=next(numbers))
                except BadRow as error:
                    bad.append(f"{place} {error}")
                    if config.on_bad_row == "raise" or len(bad) > config.max_bad_rows:
                        raise ConfigError(
                            f"{bad[0]} ({len(bad)} bad records so far, data.on_bad_row is {config.on_bad_row}, "
                            f"data.max_bad_rows {config.max_bad_rows}). Correct the file, or allow more."
                        ) from error
    for reason in bad:
        log.warning("question left out: %s", reason)


def _text(record: Record, kind: str, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        has = f"it is {value!r:.80}" if name in record else f"has {sorted(record)}"
        raise BadRow(f"needs the field {name!r} with a text (data.{kind}_field), and {has}")
    return value


def _prompt_of_function(function: Callable[[Record], Prompt], record: Record) -> Prompt:
    try:
        prompt = function(record)
    except Exception as error:  # it is the user's
        raise BadRow(f"cannot be converted: {own_error_text(error)}. Correct it.") from error
    if not isinstance(prompt, Prompt) or prompt.answer is None:
        raise ConfigError(
            f"data.format: the function returned {prompt!r:.200}; it must be a lockstep.text.Prompt with an answer, "
            'which is "" where no reward reads it. Correct it.'
        )
    return prompt


def _prompt(config: GrpoDataConfig, record: Record) -> Prompt:
    question, answer = record.get(config.question_field), record.get(config.answer_field)
    fields = {name: record[name] for name in record if name not in (config.question_field, config.answer_field)}
    if isinstance(question, list | tuple) and config.format != "text":  # as TRL names the messages of a prompt
        (*before, last) = make_prompt(messages=tuple(question)).messages or ()
        messages = [*before, {**last, "content": f"{last.get('content') or ''}{config.instruction}"}]
    else:
        text = _text(record, "question", config.question_field) + config.instruction
        messages = [{"role": "user", "content": text}]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    else:
        answer = _text(record, "answer", config.answer_field)
    if config.format == "text":
        return make_prompt(text=text, answer=answer, fields=fields)
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return make_prompt(messages=tuple(messages), answer=answer, fields=fields)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> Int[np.ndarray, " question"]:
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRows:
    """Makes rows of answers."""

    questions: Questions
    tokenizer: "PreTrainedTokenizerBase"
    stop: Sequence[str]

    @functools.cached_property
    def _decoded(self) -> AnswerDecoder:
        return AnswerDecoder(self.tokenizer)

    def row(self, step: int, question: int, completion: Completion) -> tuple[Row, Prompt]:
        """Return an answer as a row, and its question."""
        prompt, tokens = self.questions.prompts[question], self.questions.tokens[question]
        text, end = self._decoded(completion.tokens, tokens, self.stop)
        row = Row.from_completion(completion, prompt, text, prompt_end=end, step=step)
        return dataclasses.replace(row, prompt_id=prompt.id), prompt
