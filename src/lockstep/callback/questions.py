"""Prompts as the leader reads them and as every host gets them: text stays on the leader, token ids travel."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from lockstep.callback.config import InferenceEvalConfig
from lockstep.text import Prompt, StopFinder, encode, read_prompts, stop_ids
from lockstep.types import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_requests(
    config: InferenceEvalConfig, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[Prompt], list[Request]]:
    """Reads and encodes the prompts; host-only.

    Returns:
        The prompts, and one request for each, in order.

    Raises:
        PromptError: a prompt or file that cannot be used.
        ConfigError: a stop string that can never be found.
    """
    StopFinder(tokenizer).check(config.stop)
    prompts = read_prompts(config.prompts)
    params = config.sampling_params(stop_ids(tokenizer))
    encoded = encode(tokenizer, prompts, max_seq_len=config.max_seq_len, max_new_tokens=config.max_new_tokens)
    requests = [
        Request(prompt_id=prompt.id, prompt_tokens=tokens, params=params)
        for prompt, tokens in zip(prompts, encoded, strict=True)
    ]
    return prompts, requests


def to_bytes(requests: list[Request]) -> bytes:
    """Requests as they are broadcast: ids and parameters, no text."""
    return json.dumps([dataclasses.asdict(request) for request in requests]).encode()


def from_bytes(data: bytes) -> list[Request]:
    """The requests that `to_bytes` was given."""
    return [
        Request(
            prompt_id=item["prompt_id"],
            prompt_tokens=tuple(item["prompt_tokens"]),
            params=_params(item["params"]),
        )
        for item in json.loads(data)
    ]


def _params(values: dict[str, Any]) -> SamplingParams:
    """JSON has lists where the parameters have tuples."""
    return SamplingParams(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
