"""The engine as a language model of lm-evaluation-harness; imported where the harness is installed.

The interface is that of ``lm_eval.api.model`` (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness).
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lockstep.callback.evaluation.config import TasksConfig
from lockstep.errors import ConfigError, PromptError
from lockstep.printable import get_logger, visible
from lockstep.text import (
    ModelLimits,
    decode,
    special_tokens,
    split_answer,
    stop_ids,
    unknown_token,
)
from lockstep.text.stop import AnswerDecoder
from lockstep.text.tokenize import chat_text, count_appended, encode_text
from lockstep.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Generation arguments of a task that are settings of sampling by the same name."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # generation arguments that say how long an answer may be


class EngineLM(TemplateLM):
    """Turns the harness's instances into requests, and completions into what the harness expects.

    It encodes text as the harness's own ``hf`` model does: with the tokenizer's own special tokens, but none before a
    text that begins with the token for its beginning already, and none behind a text, where an answer begins.

    Args:
        limits: The tokens of question and answer together, and those that the model knows.
        kinds: A function that gives the kinds of requests that the tasks will make.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        ask: Callable[[list[Request], bool], list[Completion]],
        config: TasksConfig,
        limits: ModelLimits,
        kinds: Callable[[], Iterable[str]],
    ) -> None:
        super().__init__()
        self.tokenizer, self._decoded = tokenizer, AnswerDecoder(tokenizer)
        self.max_length, self._rows = limits.max_seq_len, limits.rows
        self.requests = 0  # the number of requests that were answered
        self.truncated = 0  # the number of requests whose beginning was left out
        self.answered_at = time.monotonic()  # when the last answers came
        self._ask, self._config, self._kinds = ask, config, kinds
        self._stop_ids = stop_ids(tokenizer)
        self._appended = count_appended(tokenizer)
        self._answered_kinds: set[str] = set()
        self._warned_of_bos = False

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token = self.tokenizer.eos_token_id
        if token is None:
            raise ConfigError("the tokenizer has no end-of-sequence token, which tasks need. Give it one.")
        return int(token)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that nothing comes before."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else int(token)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's place, which the harness wants for chats."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The token ids of a text.

        Args:
            add_special_tokens: Whether the tokenizer adds its own; None: unless the text begins with one already.
        """
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            add_special_tokens = not (first and string.startswith(first))
        tokens = encode_text(self.tokenizer, string, add_special_tokens=add_special_tokens)
        return tokens[: len(tokens) - self._appended] if add_special_tokens else tokens

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat."""
        return chat_text(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether greedy decoding would write it."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._score(pairs, "loglikelihood")

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of each whole text, longer ones in windows that predict every token once."""
        windows: list[list[tuple[list[int], list[int]]]] = []
        for instance in requests:
            (text,) = instance.args
            rolling = get_rolling_token_windows(
                token_list=self._rolling_tokens(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,  # a window has one token before it, and the engine samples one more
                context_len=1,
            )
            windows.append([make_disjoint_window(pair) for pair in rolling])
        scores = iter(self._score([pair for text_windows in windows for pair in text_windows], "loglikelihood_rolling"))
        return [sum(next(scores)[0] for _ in text_windows) for text_windows in windows]

    def _rolling_tokens(self, text: str) -> list[int]:
        """The tokens of a text whose windows begin with the token for the beginning."""
        tokens = self.tok_encode(text)
        if tokens[:1] != [self.prefix_token_id]:
            return tokens
        if self._config.single_bos:
            return tokens[1:]
        if not self._warned_of_bos:
            self._warned_of_bos = True
            log.warning(
                "loglikelihood_rolling has two tokens for the beginning before each text, one of the tokenizer and one "
                "of lm-evaluation-harness, as its own models have: perplexities are higher than with one. "
                "tasks.single_bos: true leaves one"
            )
        return tokens

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """A continuation of each context, up to a stop string or as long as its task says.

        Raises:
            ConfigError: A task has a generation argument that is not known here.
        """
        engine_requests = []
        for number, instance in enumerate(requests):
            context, arguments = instance.args
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            # An answer has the room that its question leaves, and half of all where the question leaves less.
            room = max(self.max_length - len(tokens), self.max_length // 2)
            params = self._params(arguments, instance.task_name, room)
            tokens = self._fitting(tokens, self.max_length - params.max_new_tokens)
            engine_requests.append(Request(prompt_id=number, prompt_tokens=tuple(tokens), params=params))
        completions = self._answers(engine_requests, "generate_until")
        return [
            self._content(completion.tokens, request)
            for completion, request in zip(completions, engine_requests, strict=True)
        ]

    def _content(self, tokens: Sequence[int], request: Request) -> str:
        """The final answer, without the reasoning before it."""
        return split_answer(*self._decoded(tokens, request.prompt_tokens, request.params.stop)).content

    def _params(self, arguments: Mapping[str, Any], task: str | None, room: int) -> SamplingParams:
        """A task's generation arguments as ours; what has no effect here is refused."""
        left = dict(arguments)
        until = left.pop("until", None) or []
        lengths = [left.pop(name) for name in LENGTHS if name in left]
        sampled = left.pop("do_sample", (left.get("temperature") or 0) > 0)
        values = {name: left.pop(name) for name in SAMPLING if left.get(name) is not None}
        if unknown := [name for name, value in left.items() if value is not None]:
            raise ConfigError(
                f"task {task!r} has the generation argument {unknown[0]!r}, which is not known here. Known are until, "
                f"do_sample, {', '.join((*LENGTHS, *SAMPLING))}. Remove it from a copy of the task's file."
            )
        if not sampled or values.get("temperature", 1.0) == 0:
            values = {"temperature": 0.0} | {k: v for k, v in values.items() if k == "repetition_penalty"}
        else:
            values = {"temperature": 1.0} | values
        length = int(lengths[0]) if lengths else self._config.max_new_tokens
        special = special_tokens(self.tokenizer)
        texts = [until] if isinstance(until, str) else list(until)
        # A special token is no part of the text: its id ends the answer instead.
        ids = {text: [token for name, token in special.items() if text.startswith(name)] for text in texts}
        return SamplingParams(
            max_new_tokens=min(length, room),
            stop_token_ids=tuple(sorted({*self._stop_ids, *itertools.chain(*ids.values())})),
            stop=tuple(text for text in texts if text and not ids[text]),
            **values,
        )

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], kind: str) -> list[tuple[float, bool]]:
        """For each (context, continuation) the continuation's log-probability, and whether it is the greedy one."""
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=True, top_logprobs=1)
        engine_requests = [
            Request(
                prompt_id=number,
                prompt_tokens=tuple(self._fitting([*context, *continuation], self.max_length - 1)),
                params=params,
            )
            for number, (context, continuation) in enumerate(pairs)
        ]
        scores = []
        completions = self._answers(engine_requests, kind)
        for (_, continuation), request, completion in zip(pairs, engine_requests, completions, strict=True):
            # The first token of a prompt has no probability; a continuation that was cut to that length loses it.
            scored = range(max(1, len(request.prompt_tokens) - len(continuation)), len(request.prompt_tokens))
            logprobs = [completion.prompt_logprobs[at] for at in scored]
            best = [completion.prompt_top_logprobs[at][0][0] for at in scored]
            greedy = best == [request.prompt_tokens[at] for at in scored]
            scores.append((sum(value for value in logprobs if value is not None), greedy))
        return scores

    def _fitting(self, tokens: list[int], room: int) -> list[int]:
        """The end of a prompt that has room; counted where something is left out."""
        self.truncated += len(tokens) > room
        return tokens[-max(1, room) :]

    def _answers(self, requests: list[Request], kind: str) -> list[Completion]:
        for request in requests:
            if unknown := unknown_token(self.tokenizer, request.prompt_tokens, self._rows):
                shown = visible(decode(self.tokenizer, request.prompt_tokens))
                raise PromptError(f"a question of the tasks ({kind}), {shown!r:.80}, {unknown}")
        self._answered_kinds.add(kind)
        completions = self._ask(requests, set(self._kinds()) <= self._answered_kinds) if requests else []
        self.requests += len(requests)
        self.answered_at = time.monotonic()
        return completions
