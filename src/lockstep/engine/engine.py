"""The engine: requests in, completions out, on a model that lies sharded over the devices of all hosts."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lockstep.attention import check_cache_dtype
from lockstep.device.compiler_errors import Compile, compile_lowered
from lockstep.device.memory import free_bytes
from lockstep.device.program import AroundLaunch, Compilation, Program, fetch
from lockstep.engine.config import EngineConfig, tensor_size
from lockstep.engine.decoder.copy_pages import copy_pages_arguments
from lockstep.engine.decoder.decode import decode_arguments
from lockstep.engine.decoder.kv_replication import replicate_kv_heads
from lockstep.engine.decoder.prefill import prefill_arguments
from lockstep.engine.decoder.prompt_logprobs import prompt_logprobs_arguments
from lockstep.engine.prepare import Prepared, prepare_programs, signature_of
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.result import Sizing
from lockstep.engine.validate import check_requests, repeated
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, Ledger, current, digest, environment
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder
from lockstep.placement.decode_mesh import DecodeMesh, make_decode_mesh
from lockstep.placement.lazy_weight import is_lazy, sources
from lockstep.placement.place import place
from lockstep.schedule import Capacity, CopyPagesBatch, FindStop, PrefillBatch, PromptLogprobsBatch, Scheduler
from lockstep.types import Completion, Request

type BetweenLaunches = Callable[[Scheduler], None]
"""Looks at the scheduler before each launch; may ``cancel`` sequences or ``abandon`` the rest. Alike on every host."""


class Engine:
    """Generates from a model that is already on the devices of ``mesh``; every host calls it alike.

    The engine keeps compiled programs and nothing else: cache and decode weights live for one `run`.

    Args:
        config: capacities and layout.
        mesh: the mesh that the model is sharded over (the trainer's).
        vocab_size: token ids below it may be sampled; None for all rows of the embedding.
        compile_with: the compiler; one that gives figures alone is enough to `prepare`, not to `run`.
        ledger: where launches are recorded, such as that of the job (``hosts.ledger``); None for one of its own.

    Raises:
        ConfigError: the layout does not fit the mesh, no token may be sampled, or the devices cannot read such a cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        mesh: Mesh,
        *,
        vocab_size: int | None = None,
        compile_with: Compile = compile_lowered,
        ledger: Ledger | None = None,
    ) -> None:
        if vocab_size is not None and vocab_size < 1:
            raise ConfigError(
                f"vocab_size is {vocab_size}; at least 1 token must be allowed. Give the tokenizer's number of ids, or "
                "None for all rows of the embedding."
            )
        check_cache_dtype(mesh.devices.flat[0], config.kv_cache_dtype)
        self.config = config
        self.mesh = mesh
        self.decode_mesh: DecodeMesh = make_decode_mesh(mesh, tensor_size(config.layout) or 1)
        self.vocab_size = vocab_size
        self._compile_with = compile_with
        self.ledger = Ledger() if ledger is None else ledger
        self._built: Prepared | None = None
        self._compilations: list[Compilation] = []

    @property
    def sizes(self) -> Capacity | None:
        """The capacities in use, or None before the first `prepare`."""
        return self._built.sizing.sizes if self._built else None

    @property
    def sizing(self) -> Sizing | None:
        """Layout and capacities in use and why, or None before the first `prepare`; ``describe()`` is for reading."""
        return self._built.sizing if self._built else None

    @property
    def programs(self) -> Mapping[str, Program]:
        """The compiled programs by name."""
        return self._built.programs.by_name() if self._built else {}

    @property
    def compilations(self) -> Sequence[Compilation]:
        """Programs compiled for use so far, in order: name, shapes, seconds. None is added once requests repeat."""
        return tuple(self._compilations)

    def free_bytes(self, model: Any = None) -> int:
        """Free memory on the fullest device of this process; hosts agree on the least (``Hosts.least``) to `prepare`.

        Args:
            model: needed only for a mesh of devices that can be compiled for but not run on.
        """
        if self.config.memory_bytes_per_device is not None:
            return self.config.memory_bytes_per_device
        return free_bytes(self.mesh, None if model is None else read_decoder(model)[1])

    def check(self, model: Any, requests: Sequence[Request], *, free: int | None = None) -> Capacity:
        """Refuses what can never work, without compiling or launching anything.

        Args:
            model: what `lockstep.models.read_decoder` reads.
            requests: at least one.
            free: bytes on the fullest device of all hosts; None: of this process.

        Returns:
            The capacities that `prepare` would begin with.

        Raises:
            ConfigError: a capacity, layout, model or request that cannot work.
            PromptError: a prompt has a token that the model does not have.
            CapacityError: a request that can never fit.
        """
        config, weights = self._checked(model, requests)
        free = self.free_bytes(model) if free is None else free
        return Chooser(self.config, config, weights, self.mesh, free).choose(requests, self.sizing).sizes

    def prepare(self, model: Any, requests: Sequence[Request], *, free: int | None = None) -> dict[str, str]:
        """Checks the requests and compiles what they need; launches nothing and talks to no other host.

        Args:
            model: what `lockstep.models.read_decoder` reads.
            requests: at least one.
            free: bytes on the fullest device of all hosts, agreed on; None: of this process.

        Returns:
            The digests of all programs by name. Hosts must agree on them before `run`.

        Raises:
            ConfigError: a capacity, layout, model or request that cannot work.
            PromptError: a prompt has a token that the model does not have.
            CapacityError: a request that can never fit.
        """
        config, weights = self._checked(model, requests)
        self._built = prepare_programs(
            self.config,
            self.mesh,
            config,
            weights,
            requests,
            free=self.free_bytes(model) if free is None else free,
            vocab_size=self.vocab_size,
            ledger=self.ledger,
            before=self._built,
            compile_with=self._compile_with,
        )
        self.decode_mesh = self._built.decode_mesh
        known = {id(compilation) for compilation in self._compilations}
        compiled = [program.compilation for program in self.programs.values()]
        self._compilations += [each for each in compiled if id(each) not in known]
        return {name: text for program in self.programs.values() for name, text in program.digests.items()}

    def run(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        around_launch: AroundLaunch = contextlib.nullcontext,
        find_stop: FindStop | None = None,
        between_launches: BetweenLaunches | None = None,
    ) -> list[Completion]:
        """Generates; every host must call it with the same arguments after the same `prepare`.

        Args:
            model: as given to `prepare`, or a later state of it.
            requests: as given to `prepare`.
            around_launch: called with the program's name; its context surrounds a launch and, for ``decode`` and
                ``score``, the wait for its result (and so for everything launched before it).
            find_stop: finds stop strings, such as ``lockstep.StopFinder(tokenizer)``; needed if a request has any.
            between_launches: called with the scheduler before each launch, to cancel sequences or to end the run. It
                must do the same on every host.

        Returns:
            Completions in the order of the requests, then of their generations; the same on every host.

        Raises:
            ConfigError: the model's shapes, dtypes or placement are not those that were prepared for, or a request has
                stop strings and there is no ``find_stop``.
            CapacityError: a request that was not prepared for does not fit.
        """
        weights = self._prepared_for(model)
        scheduler = self._scheduler(requests, find_stop)
        for _ in self._launches(weights, scheduler, around_launch, between_launches):
            pass
        return scheduler.completions()

    def stream(
        self,
        model: Any,
        requests: Iterable[Request],
        *,
        around_launch: AroundLaunch = contextlib.nullcontext,
        find_stop: FindStop | None = None,
        between_launches: BetweenLaunches | None = None,
    ) -> Generator[list[Completion], None, None]:
        """`run` for any number of prompts: they are read as room becomes free, and answers leave as they are complete.

        At most ``max_prompts_per_batch`` prompts are held at a time, and new ones are read while others are still being
        answered, so that no slot waits for the end of a batch. Cache and decode weights are freed when the iterator
        ends or is closed. Every host must take the same steps: between two of them it may do what a host can do alone,
        but launch nothing.

        Args:
            model: as for `run`.
            requests: read one by one, the same on every host. `prepare` must have seen requests that need as much as
                any of them: as long, with as many stop tokens, with the same sampling features.
            around_launch: as for `run`.
            find_stop: as for `run`.
            between_launches: as for `run`.

        Yields:
            After each launch that finished any prompt, all completions of those prompts, in the order of the requests.

        Raises:
            ConfigError, PromptError, CapacityError: as for `prepare` and `run`, when the request is read.
        """
        weights = self._prepared_for(model)
        scheduler = self._scheduler(_checked(requests, weights.embed.shape[0], self.vocab_size), find_stop)
        for _ in self._launches(weights, scheduler, around_launch, between_launches):
            if answered := scheduler.take_answered():
                yield answered
        if answered := scheduler.take_answered():
            yield answered

    def _prepared_for(self, model: Any) -> DecoderWeights:
        assert self._built is not None, "prepare() comes before run()"
        config, weights = read_decoder(model)
        if signature_of(config, weights) != self._built.signature:
            raise ConfigError(
                "the model's configuration, shapes, dtypes or placement are not those that the engine prepared for. "
                "Call prepare with this model first."
            )
        return replicate_kv_heads(config, weights, self.decode_mesh.tensor)[1]

    def _scheduler(self, requests: Iterable[Request], find_stop: FindStop | None) -> Scheduler:
        assert self._built is not None
        sizing = self._built.sizing
        return Scheduler(
            sizing.sizes,
            requests,
            find_stop,
            share_prefixes=self.config.share_prefixes,
            max_prompts=sizing.max_prompts,
        )

    def _launches(
        self,
        weights: DecoderWeights,
        scheduler: Scheduler,
        around_launch: AroundLaunch,
        between_launches: BetweenLaunches | None,
    ) -> Iterator[None]:
        """Launches until all is answered; gives way after each launch whose results were committed."""
        assert self._built is not None
        programs = self._built.programs
        with around_launch("reshard"):
            if programs.reshard is not None:
                weights = programs.reshard(sources(weights) if is_lazy(weights) else weights)
            pool = programs.new_cache()
        by_replica = self.decode_mesh.sharding(self.decode_mesh.replica_axes or None)
        while True:
            if between_launches is not None:
                between_launches(scheduler)
            plan = scheduler.next_batch()
            if plan is None:
                break
            if isinstance(plan, PrefillBatch):
                with around_launch("prefill"):
                    pool = programs.prefill(weights, pool, *(place(a, by_replica) for a in prefill_arguments(plan)))
                continue
            if isinstance(plan, CopyPagesBatch):
                assert programs.copy_pages is not None
                with around_launch("copy_pages"):
                    pool = programs.copy_pages(pool, *(place(a, by_replica) for a in copy_pages_arguments(plan)))
                continue
            if isinstance(plan, PromptLogprobsBatch):
                assert programs.prompt_logprobs is not None
                with around_launch("prompt_logprobs"):
                    found = programs.prompt_logprobs(
                        weights, pool, *(place(a, by_replica) for a in prompt_logprobs_arguments(plan))
                    )
                    results = [fetch(result) for result in found]
                scheduler.commit_prompt_logprobs(plan, *results)
                continue
            with around_launch("decode"):
                pool, *results = programs.decode(
                    weights,
                    pool,
                    place(np.asarray(plan.num_steps, np.int32), self.decode_mesh.sharding()),
                    *(place(a, by_replica) for a in decode_arguments(plan)),
                )
                results = [fetch(result) for result in results]
            scheduler.commit(plan, *results)
            yield
        pool.delete()

    def generate(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        hosts: Hosts | None = None,
        find_stop: FindStop | None = None,
        between_launches: BetweenLaunches | None = None,
    ) -> list[Completion]:
        """Prepares, agrees with the other hosts, generates, and agrees on the result. Every host calls it alike.

        Args:
            model: what `lockstep.models.read_decoder` reads.
            requests: may be none, on every host.
            hosts: of the job; None: the current ones.
            find_stop: as for `run`.
            between_launches: as for `run`.

        Returns:
            Completions in the order of the requests, then of their generations; the same on every host.

        Raises:
            PeerError: on every host alike, when preparation or generation failed on at least one.
            DisagreementError: hosts were given different requests, versions or flags, or compiled different programs.
            LaunchMismatchError: hosts launched different programs.
        """
        with (current() if hosts is None else hosts).scope("generate") as scope:
            with scope.run_on_all("measure memory") as measured:
                measured.agree({**environment(), "requests": digest(repr(list(requests)))})
                measured.share(self.free_bytes(model))
            if not requests:
                return []
            with scope.run_on_all("prepare") as prepared:
                prepared.agree(self.prepare(model, requests, free=min(measured.shared)))
            with scope.launch_on_all("generate", self.ledger) as generated:
                completions = self.run(model, requests, find_stop=find_stop, between_launches=between_launches)
                generated.agree({"tokens": digest(repr(completions))})
        return completions

    def _checked(self, model: Any, requests: Sequence[Request]) -> tuple[LlamaConfig, DecoderWeights]:
        if not requests:
            raise ConfigError("there are 0 requests; the engine needs at least 1 to prepare for. Give it a prompt.")
        config, weights = read_decoder(model)
        check_requests(requests, weights.embed.shape[0], self.vocab_size)
        return config, weights


def _checked(requests: Iterable[Request], rows: int, vocab_size: int | None) -> Iterator[Request]:
    """Requests one by one, each checked as `check_requests` checks all together."""
    seen: set[int] = set()
    for request in requests:
        check_requests([request], rows, vocab_size)
        if request.prompt_id in seen:
            raise repeated(request.prompt_id)
        seen.add(request.prompt_id)
        yield request
