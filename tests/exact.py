"""Bits of log-probabilities with `numerics: exact`: those of the engine, and those of the training forward."""

import dataclasses
from typing import Any

import jax
import numpy as np

from lockstep.engine import Engine, EngineConfig
from lockstep.models import LlamaConfig
from lockstep.placement import place
from lockstep.training.objectives.logprobs import token_logprobs
from lockstep.types import Completion, Request
from tests.unit.engine.models import LLAMA, in_bfloat16, mesh_of, model_on, request

EXACT = dataclasses.replace(LLAMA, numerics="exact")
REQUESTS = [
    request(0, 3, 9, n_generations=2),
    request(1, 40, 12, temperature=0.7, seed=3, n_generations=2),
    request(2, 17, 12, temperature=1.3, seed=4, prompt_logprobs=True),
]
type Bits = dict[str, tuple[list[int], list[str]]]
"""Tokens and hexadecimal log-probabilities by prompt and generation."""


def model_of(mesh: str, dtype: str, config: LlamaConfig = EXACT) -> Any:
    """A model with random weights."""
    model = model_on(mesh, config)
    return in_bfloat16(model) if dtype == "bfloat16" else model


def completed(
    mesh: str, model: Any, requests: list[Request] = REQUESTS, hosts: Any = None, **engine: Any
) -> list[Completion]:
    """The engine's answers."""
    return Engine(EngineConfig(**engine), mesh_of(mesh)).generate(model, requests, hosts=hosts)


def bits_of(completions: list[Completion]) -> Bits:
    """The engine's bits."""
    return {
        _name(each): (list(each.tokens), _hex([*each.logprobs, *(each.prompt_logprobs or ())[1:]]))
        for each in completions
    }


def trainer_bits(mesh: str, model: Any, completions: list[Completion], requests: list[Request] = REQUESTS) -> Bits:
    """The same from the training forward on a mesh, all rows at once."""
    prompts = {each.prompt_id: each.prompt_tokens for each in requests}
    rows = [(*prompts[each.prompt_id], *each.tokens) for each in completions]
    tokens = np.zeros((-(-len(rows) // 4) * 4, max(map(len, rows))), np.int32)
    for row, known in zip(tokens, rows, strict=False):
        row[: len(known)] = known
    everywhere = jax.NamedSharding(mesh_of(mesh), jax.P())

    def logprobs(model: Any, tokens: jax.Array) -> jax.Array:
        return token_logprobs(model, {"tokens": tokens})

    with jax.set_mesh(mesh_of(mesh)):
        found = np.asarray(jax.jit(logprobs, out_shardings=everywhere)(model, place(tokens, everywhere)))
    bits: Bits = {}
    for row, each in zip(found, completions, strict=False):
        first = len(prompts[each.prompt_id]) - 1
        wanted = [*row[first : first + len(each.tokens)], *(row[:first] if each.prompt_logprobs else ())]
        bits[_name(each)] = list(each.tokens), _hex(wanted)
    return bits


def _name(completion: Completion) -> str:
    return f"{completion.prompt_id}.{completion.generation_id}"


def _hex(values: Any) -> list[str]:
    return [float(np.float32(value)).hex() for value in values]
