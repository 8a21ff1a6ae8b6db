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


def trainer_bits(
    mesh: str, model: Any, completions: list[Completion], requests: list[Request] = REQUESTS, packed: int = 0
) -> Bits:
    """The same from the training forward on a mesh, all rows at once, each of one sequence or packed with several."""
    prompts = {each.prompt_id: each.prompt_tokens for each in requests}
    rows = [(*prompts[each.prompt_id], *each.tokens) for each in completions]
    groups = [rows[at : at + (packed or 1)] for at in range(0, len(rows), packed or 1)]
    begins = [sum(map(len, group[:at])) for group in groups for at in range(len(group))]
    tokens = np.zeros((-(-len(groups) // 4) * 4, max(sum(map(len, group)) for group in groups)), np.int32)
    segment_ids = np.zeros_like(tokens)
    for number, (begin, known) in enumerate(zip(begins, rows, strict=True)):
        where = number // (packed or 1), slice(begin, begin + len(known))
        tokens[where], segment_ids[where] = known, number + 1
    columns = {"tokens": tokens} | ({"segment_ids": segment_ids} if packed else {})
    everywhere = jax.NamedSharding(mesh_of(mesh), jax.P())

    with jax.set_mesh(mesh_of(mesh)):
        batch = {name: place(column, everywhere) for name, column in columns.items()}
        found = np.asarray(jax.jit(token_logprobs, out_shardings=everywhere)(model, batch))
    bits: Bits = {}
    for number, (begin, each) in enumerate(zip(begins, completions, strict=True)):
        row, first = found[number // (packed or 1), begin:], len(prompts[each.prompt_id]) - 1
        wanted = [*row[first : first + len(each.tokens)], *(row[:first] if each.prompt_logprobs else ())]
        bits[_name(each)] = list(each.tokens), _hex(wanted)
    return bits


def _name(completion: Completion) -> str:
    return f"{completion.prompt_id}.{completion.generation_id}"


def _hex(values: Any) -> list[str]:
    return [float(np.float32(value)).hex() for value in values]
