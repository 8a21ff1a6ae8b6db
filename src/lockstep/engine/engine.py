"""The engine: requests in, completions out, on a model that lies sharded over the devices of all hosts."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep.engine.build import Programs, build_programs
from lockstep.engine.check import check_requests
from lockstep.engine.config import EngineConfig, tensor_size
from lockstep.engine.decode import decode_arguments
from lockstep.engine.memory import work_out_sizes
from lockstep.engine.prefill import prefill_arguments
from lockstep.engine.program import Ledger, Program
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, current, digest
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder
from lockstep.placement.layout import DecodeGrid, decode_grid
from lockstep.placement.place import place
from lockstep.schedule import PrefillPlan, Scheduler, ScheduleSizes, check_capacity
from lockstep.types import Completion, Request

type AroundLaunch = Callable[[str], contextlib.AbstractContextManager[object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Built:
    """What was compiled, and for what."""

    signature: Any
    sizes: ScheduleSizes
    programs: Programs


class Engine:
    """Generates from a model that is already on the devices of ``mesh``; every host calls it alike.

    The engine keeps compiled programs and nothing else: cache and decode weights live for one `run`.

    Args:
        config: capacities and layout.
        mesh: the mesh that the model is sharded over (the trainer's).
        vocab_size: token ids below it may be sampled; None for all rows of the embedding.

    Raises:
        ConfigError: the layout does not fit the mesh, or no token may be sampled.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, *, vocab_size: int | None = None) -> None:
        if vocab_size is not None and vocab_size < 1:
            raise ConfigError(
                f"vocab_size is {vocab_size}; at least 1 token must be allowed. Give the tokenizer's number of ids, or "
                "None for all rows of the embedding."
            )
        self.config = config
        self.mesh = mesh
        self.grid: DecodeGrid = decode_grid(mesh, tensor_size(config.layout) or 1)
        self.vocab_size = vocab_size
        self.ledger = Ledger()
        self._built: _Built | None = None

    @property
    def sizes(self) -> ScheduleSizes | None:
        """The capacities in use, or None before the first `prepare`."""
        return self._built.sizes if self._built else None

    @property
    def programs(self) -> Mapping[str, Program]:
        """The compiled programs by name."""
        return self._built.programs.by_name() if self._built else {}

    def check(self, model: Any, requests: Sequence[Request]) -> ScheduleSizes:
        """Refuses what can never work, without compiling or launching anything.

        Args:
            model: what `lockstep.models.read_decoder` reads.
            requests: at least one.

        Returns:
            The capacities that `prepare` would use.

        Raises:
            ConfigError: a capacity, layout, model or request that cannot work.
            PromptError: a prompt has a token that the model does not have.
            CapacityError: a request that can never fit.
        """
        if not requests:
            raise ConfigError("there are 0 requests; the engine needs at least 1 to prepare for. Give it a prompt.")
        config, weights = read_decoder(model)
        check_requests(requests, weights.embed.shape[0], self.vocab_size)
        sizes = work_out_sizes(self.config, config, self.grid, requests, self.sizes)
        check_capacity(sizes, requests)
        return sizes

    def prepare(self, model: Any, requests: Sequence[Request]) -> dict[str, str]:
        """Checks the requests and compiles what they need; launches nothing and talks to no other host.

        Args:
            model: what `lockstep.models.read_decoder` reads.
            requests: at least one.

        Returns:
            The digest of each program by name. Hosts must agree on them before `run`.

        Raises:
            ConfigError: a capacity, layout, model or request that cannot work.
            PromptError: a prompt has a token that the model does not have.
            CapacityError: a request that can never fit.
        """
        config, weights = read_decoder(model)
        before = self._built
        sizes = self.check(model, requests)
        signature = _signature(config, weights)
        if before is None or before.signature != signature or before.sizes != sizes:
            programs = build_programs(
                self.config, config, weights, self.grid, sizes, vocab_size=self.vocab_size, ledger=self.ledger
            )
            self._built = _Built(signature=signature, sizes=sizes, programs=programs)
        return {name: program.digest for name, program in self.programs.items()}

    def run(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        around_launch: AroundLaunch = contextlib.nullcontext,
    ) -> list[Completion]:
        """Generates; every host must call it with the same arguments after the same `prepare`.

        Args:
            model: as given to `prepare`, or a later state of it.
            requests: as given to `prepare`.
            around_launch: called with the program's name; its context surrounds a launch and, for ``decode``, the wait
                for its result (and so for everything launched before it).

        Returns:
            Completions in the order of the requests, then of their generations; the same on every host.

        Raises:
            ConfigError: the model's shapes, dtypes or placement are not those that were prepared for.
            CapacityError: a request that was not prepared for does not fit.
        """
        assert self._built is not None, "prepare() comes before run()"
        programs = self._built.programs
        config, weights = read_decoder(model)
        if _signature(config, weights) != self._built.signature:
            raise ConfigError(
                "the model's configuration, shapes, dtypes or placement are not those that the engine prepared for. "
                "Call prepare with this model first."
            )
        scheduler = Scheduler(self._built.sizes, requests)
        with around_launch("relay"):
            if programs.relay is not None:
                weights = programs.relay(weights)
            pool = programs.new_cache()
        by_replica = self.grid.sharding(self.grid.replica_axes or None)
        while (plan := scheduler.next_plan()) is not None:
            if isinstance(plan, PrefillPlan):
                with around_launch("prefill"):
                    pool = programs.prefill(weights, pool, *(place(a, by_replica) for a in prefill_arguments(plan)))
                continue
            with around_launch("decode"):
                pool, *results = programs.decode(
                    weights,
                    pool,
                    place(np.asarray(plan.num_steps, np.int32), self.grid.sharding()),
                    *(place(a, by_replica) for a in decode_arguments(plan)),
                )
                results = [_fetch(result) for result in results]
            scheduler.commit(plan, *results)
        pool.delete()
        return scheduler.completions()

    def generate(self, model: Any, requests: Sequence[Request], *, hosts: Hosts | None = None) -> list[Completion]:
        """Prepares, agrees with the other hosts, generates, and agrees on the result. Every host calls it alike.

        Args:
            model: what `lockstep.models.read_decoder` reads.
            requests: may be none, on every host.
            hosts: of the job; None: the current ones.

        Returns:
            Completions in the order of the requests, then of their generations; the same on every host.

        Raises:
            PeerError: on every host alike, when preparation or generation failed on at least one.
            DisagreementError: hosts were given different requests or compiled different programs.
        """
        with (current() if hosts is None else hosts).scope("generate") as scope:
            digests = _settled(scope, "prepare", lambda: self.prepare(model, requests) if requests else {})
            scope.agree("programs", {"requests": digest(repr(list(requests))), **digests})
            if not requests:
                return []
            completions = _settled(scope, "generate", lambda: self.run(model, requests))
            scope.agree("tokens", {"tokens": digest(repr(completions)), "launches": str(self.ledger)})
            scope.barrier("done")
        return completions


def _settled[T](scope: Hosts, name: str, work: Callable[[], T]) -> T:
    """Does ``work`` on every host; when it fails on any, all raise the same error."""
    result, error = None, None
    try:
        result = work()
    except Exception as failure:
        error = failure
    scope.settle(name, error)
    return cast(T, result)


def _signature(config: LlamaConfig, weights: DecoderWeights) -> object:
    """All that programs depend on besides the sizes."""
    return config, jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)), weights)


def _fetch(replicated: jax.Array) -> np.ndarray:
    return np.asarray(replicated.addressable_data(0))
