"""The rollout of Tunix's RL learners by our engine."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common, reshard, utils
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from lockstep.engine import Engine, EngineConfig, Session
from lockstep.errors import ConfigError, LockstepError
from lockstep.hosts import Hosts, current, environment
from lockstep.models import read_decoder
from lockstep.placement import mesh_of
from lockstep.placement.device import fetch
from lockstep.text.tokenize import panics_as_errors
from lockstep.text.tokenizer import added_text
from lockstep.types import Completion, Request, SamplingParams


def compute_dtype(model: Any) -> str | None:
    """Return the name of the dtype; None for that of the parameters, where the model's configuration has none."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return None if dtype is None else jnp.dtype(dtype).name


class Rollout(BaseRollout):
    """Generates for Tunix's RL learners: ``ClusterConfig(rollout_engine=lockstep.tunix.Rollout, …)``.

    Where actor and rollout have one mesh it samples from the actor's own weights, and nothing is copied between
    updates; on a mesh of its own it keeps a copy, which the learner updates. Prompts that follow each other and are
    equal, as the learner repeats them, are prefilled once. In a job of several processes all call it with the same
    prompts, and each gets all answers.

    Args:
        tokenizer: A Hugging Face tokenizer, or Tunix's adapter of one.
        rollout_config: The configuration; each call of `generate` has one of its own.
        engine: Capacities and layout; None lets the engine work them out. Give it by ``functools.partial``.
        hosts: The processes of the job; None for the current ones.

    Raises:
        ConfigError: A field of ``rollout_config`` has no effect here, the engine rounds weights, or a job of several
            processes has a rollout on a mesh of its own.
        UnreadableModelError: No reader reads the model.

    Example:
        >>> import functools
        >>> import lockstep.tunix
        >>> small = lockstep.EngineConfig(max_seqs=8)
        >>> rollout_engine = functools.partial(lockstep.tunix.Rollout, engine=small)  # or lockstep.tunix.Rollout itself
        >>> issubclass(rollout_engine.func, lockstep.tunix.Rollout)
        True
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh,
        rollout_config: RolloutConfig,
        engine: EngineConfig | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._hosts = current() if hosts is None else hosts
        _check(rollout_config)
        config = EngineConfig() if engine is None else engine
        if config.weight_dtype != "auto":
            raise ConfigError(
                f"engine.weight_dtype is {config.weight_dtype}: the learner would take answers of rounded weights for "
                "those of its own, and what it corrects cannot be seen from here. Set weight_dtype to auto."
            )
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        if self._hosts.count > 1:
            self._check_mesh(rollout_actor, mesh)
        self._model = reshard.reshard_model_to_mesh(rollout_actor, mesh)
        weights = read_decoder(self._model)[1]
        dtype = rollout_config.data_type
        if config.dtype is None:
            name = compute_dtype(self._model) if dtype is None else np.dtype(dtype).name
            config = dataclasses.replace(config, dtype=name)
        self.engine = Engine(config, mesh_of(weights.embed))
        """The engine, with its programs; it keeps no weights."""
        self._session = Session(self.engine)
        self._calls = 0
        self._rows = weights.embed.shape[0]

    def _check_mesh(self, actor: nnx.Module, mesh: Mesh) -> None:
        """Refuse a mesh on which processes would not all launch the actor's programs and ours in one order."""
        processes = {device.process_index for device in mesh.devices.flat}
        if utils.get_pytree_mesh_info(nnx.state(actor)) != mesh or len(processes) < self._hosts.count:
            raise ConfigError(
                f"The mesh of lockstep.tunix.Rollout is not the actor's, or leaves out processes: this job has "
                f"{self._hosts.count}, and the mesh devices of {sorted(processes)}. Give Role.ACTOR and Role.ROLLOUT "
                "one mesh of all devices, or run the learner in one process (docs/tunix.md)."
            )

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Answer prompts; every call has other draws.

        Args:
            rollout_config: Lengths and sampling. ``seed`` is mixed with the number of the call.
            **kwargs: Nothing; Tunix passes none.

        Returns:
            Texts, each what its answer adds to its prompt's, tokens without the end-of-sequence token, the prompts
            left-padded to ``max_prompt_length`` (the next power of 2 of the longest, where that is longer), and with
            ``return_logprobs`` the log-probabilities of the tokens at the temperature, without filters, as Tunix's own
            sampler has them.

        Raises:
            PeerError: A request cannot work, such as one that is longer than the model's longest sequence.
            LockstepError: The job is asked to end; raised on every process.
        """
        _check(rollout_config)
        tokens = [self._encode(prompt) for prompt in prompts]
        longest = max(map(len, tokens))
        width = rollout_config.max_prompt_length
        width = width if width is not None and longest <= width else 1 << (longest - 1).bit_length()
        params = self._params(rollout_config)
        self._calls += 1
        requests = _grouped(tokens, params)
        largest = [dataclasses.replace(request, prompt_tokens=(0,) * width) for request in requests]
        with self._hosts.scope("generate") as scope:
            # Made for the widest prompts: whatever the lengths of this call's, the same programs.
            generation = self._session.generate(scope, self._model, requests, largest=largest, facts=environment())
        if generation.ended:  # the same on every process
            raise LockstepError("the job is asked to end (SIGTERM): there are no answers to learn from.")
        completions = generation.completions
        padded = np.full((len(tokens), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, tokens, strict=True):
            row[width - len(prompt) :] = prompt
        answers = [_without_stop(completion, params) for completion in completions]
        logprobs = (
            self._logprobs(padded, completions, params, rollout_config) if rollout_config.return_logprobs else None
        )
        return RolloutOutput(
            text=[
                added_text(self._decoded, answer.tolist(), prompt)
                for prompt, answer in zip(tokens, answers, strict=True)
            ],
            logits=[],
            tokens=answers,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Return the log-probabilities ``[batch, token]`` of completions, by Tunix's own forward."""
        return self._own_logprobs(prompt_tokens, completion_tokens, 1.0)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take the actor's parameters.

        Args:
            filter_types: The types of these, such as the adapters alone; None for all, which are where they belong.
        """
        if filter_types is not None:
            # On CPU, where jax moves arrays from mesh to mesh through the host, Tunix forbids that here.
            with jax.transfer_guard("allow"):
                params = reshard.reshard_pytree(params, nnx.state(self._model, filter_types))
        nnx.update(self._model, params)

    def pad_id(self) -> int:
        """Return the token id of padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the token id that ends an answer."""
        return int(self._tokenizer.eos_id())

    def model(self) -> nnx.Module:
        """Return the model that is sampled; on the actor's mesh it is the actor."""
        return self._model

    def _encode(self, prompt: str) -> list[int]:
        """Token ids as Tunix's sampler has them, without the end that a tokenizer puts behind a text."""
        bos, end = self._tokenizer.bos_id(), self._tokenizer.eos_id()
        with panics_as_errors():
            ids: list[int] = self._tokenizer.encode(prompt)
            if self._tokenizer.encode("a")[-1:] == [end] == ids[-1:]:
                ids = ids[:-1]
        return list(self._tokenizer.dedup_bos_ids([bos, *ids] if bos else ids))

    def _decoded(self, tokens: list[int]) -> str:
        """The text of token ids, special tokens included, as Tunix's sampler has it."""
        with panics_as_errors():
            return str(self._tokenizer.decode(tokens))

    def _params(self, config: RolloutConfig) -> SamplingParams:
        greedy = config.top_p is None  # what Tunix's sampler makes of it
        stops = config.eos_tokens or [self.eos_id()]
        return SamplingParams(
            max_new_tokens=config.max_tokens_to_generate,
            temperature=0.0 if greedy else float(config.temperature),
            top_p=1.0 if greedy else config.top_p,
            top_k=None if greedy or config.top_k is None or config.top_k <= 0 else config.top_k,
            stop_token_ids=tuple(stop for stop in stops if stop < self._rows),  # others are never sampled
            seed=_seed(config.seed, self._calls),
        )

    def _logprobs(
        self, padded: np.ndarray, completions: Sequence[Completion], params: SamplingParams, config: RolloutConfig
    ) -> list[np.ndarray]:
        """Those of the distribution at the temperature, before filters."""
        lengths = [len(_without_stop(completion, params)) for completion in completions]
        if params.temperature in (0.0, 1.0):
            logprobs = [completion.logprobs for completion in completions]
        elif params.top_p == 1.0 and params.top_k is None:
            logprobs = [completion.sampled_logprobs for completion in completions]
        else:
            tokens = np.full((len(completions), config.max_tokens_to_generate), self.pad_id(), np.int32)
            for row, completion in zip(tokens, completions, strict=True):
                row[: len(completion.tokens)] = completion.tokens
            own = self._own_logprobs(padded, tokens, params.temperature)
            logprobs = list(fetch(jax.device_put(own, NamedSharding(self.engine.mesh, PartitionSpec()))))
        return [np.asarray(values[:length], np.float32) for values, length in zip(logprobs, lengths, strict=True)]

    def _own_logprobs(self, prompts: Any, completions: Any, temperature: float) -> jax.Array:
        graph, state = nnx.split(self._model)
        logprobs: jax.Array = common.compute_per_token_logps(
            graph,
            state,
            prompt_tokens=prompts,
            completion_tokens=completions,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
            temperature=temperature,
        )
        return logprobs


def _grouped(tokens: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    """One request for each run of equal prompts."""
    requests: list[Request] = []
    for ids in map(tuple, tokens):
        if requests and requests[-1].prompt_tokens == ids:
            last = requests[-1]
            more = dataclasses.replace(last.params, n_generations=last.params.n_generations + 1)
            requests[-1] = dataclasses.replace(last, params=more)
        else:
            requests.append(Request(prompt_id=len(requests), prompt_tokens=ids, params=params))
    return requests


def _without_stop(completion: Completion, params: SamplingParams) -> np.ndarray:
    """The tokens, without the one that ended them."""
    tokens = completion.tokens
    return np.asarray(tokens[:-1] if tokens and tokens[-1] in params.stops else tokens, np.int32)


def _seed(seed: Any, call: int) -> int:
    """A seed of a call, from the configured one (None, a number or a key of jax) and the number of the call."""
    if isinstance(seed, jax.Array):
        typed = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        seed = np.asarray(jax.random.key_data(seed) if typed else seed).tolist()
    return int.from_bytes(hashlib.sha256(f"{seed} {call}".encode()).digest()[:4])


def _check(config: RolloutConfig) -> None:
    """Refuse what has no effect here."""
    for name, default in (("tensor_parallel_size", -1), ("data_parallel_size", -1), ("expert_parallel_size", 1)):
        value = getattr(config, name)
        if value != default:
            raise ConfigError(
                f"rollout_config.{name} is {value}; lockstep.tunix.Rollout chooses its layout from mesh and memory. "
                f"Leave it at {default}, or choose a layout: functools.partial(lockstep.tunix.Rollout, engine="
                "EngineConfig(layout={'tensor': N}))."
            )
