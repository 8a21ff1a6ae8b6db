"""The engine: requests in, completions out, on a model that is sharded over the devices of all hosts."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from lockstep.engine.config import EngineConfig, context_size, tensor_size
from lockstep.engine.decode_model import DecodeModel, DecodeModels, signature_of
from lockstep.engine.decoder.exact_proof import AGREED, prove_exact
from lockstep.engine.decoder.transformer import routed_shape
from lockstep.engine.launches import Devices, Gate, Observer, launch_all
from lockstep.engine.prepare import Prepared, prepare_programs
from lockstep.engine.schedule import Capacity, Counts, FindStop, Scheduler
from lockstep.engine.session import Session
from lockstep.engine.sizing.choose import Chooser
from lockstep.engine.sizing.demand import check_requests, checked
from lockstep.engine.sizing.result import Sizing
from lockstep.engine.small_moves import KnownModel, can_follow, describe_change, describe_uneven_layers
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, Ledger, current, environment
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder
from lockstep.placement import DecodeMesh, make_decode_mesh, sources
from lockstep.placement.device import Compilation, Compile, Program, compile_lowered, free_bytes
from lockstep.printable import get_logger
from lockstep.types import Completion, Request

log = get_logger(__name__)


class Engine:
    """Generates from a model that is already on the devices of ``mesh``; every host makes the same calls.

    The engine keeps compiled programs and nothing else: cache and decode weights live for one `stream`. Whatever takes
    a model takes what `lockstep.models.read_decoder` returned too, so that a caller who makes several calls about one
    state of a model can read it once.

    Args:
        config: Caps and layout.
        mesh: The mesh that the model is sharded over (the trainer's).
        vocab_size: The number of token ids that may be sampled, from 0; None for all rows of the embedding.
        compile_with: The compiler; one that gives figures alone is enough to `prepare`, not to `stream`.
        ledger: Where launches are recorded, such as that of the job (``hosts.ledger``); None for one of its own.

    Raises:
        ConfigError: The layout does not fit the mesh, or no token may be sampled.

    Example:
        >>> engine = lockstep.Engine(lockstep.EngineConfig(max_seq_len=64), mesh)
        >>> asked = lockstep.Request(prompt_id=0, prompt_tokens=(1,), params=lockstep.SamplingParams(max_new_tokens=4))
        >>> (completion,) = engine.generate(model, [asked])
        >>> len(completion.tokens)
        4
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
        self.config = config
        self.mesh = mesh
        self.decode_mesh: DecodeMesh = make_decode_mesh(
            mesh, tensor_size(config.layout) or 1, context_size(config.layout)
        )
        self.vocab_size = vocab_size
        self._compile_with = compile_with
        self.ledger = Ledger() if ledger is None else ledger
        self._built: Prepared | None = None
        self._known: KnownModel | None = None
        self._compilations: list[Compilation] = []

    @property
    def sizes(self) -> Capacity | None:
        """The capacity in use, or None before the first `prepare`."""
        return self._built.sizing.sizes if self._built else None

    @property
    def sizing(self) -> Sizing | None:
        """Layout and capacity in use and why, or None before the first `prepare`; ``describe()`` is for reading."""
        return self._built.sizing if self._built else None

    @property
    def decode_model(self) -> DecodeModel | None:
        """The model in the layout in use, without its arrays, or None before the first `prepare`."""
        return self._built.model if self._built else None

    @property
    def programs(self) -> Mapping[str, Program]:
        """The compiled programs by name."""
        return self._known.programs | self._built.programs.by_name() if self._built and self._known else {}

    @property
    def compilations(self) -> Sequence[Compilation]:
        """Programs compiled for use so far, in order: name, shapes, seconds. None is added once requests repeat."""
        return tuple(self._compilations)

    def free_bytes(self, model: Any = None) -> int:
        """Free memory on the device of this process that has the least; hosts agree on the least of all to `prepare`.

        Args:
            model: The model, which is waited for: while a train step runs, its temporaries take memory that is free
                afterwards. Needed for a mesh of devices that can be compiled for but not run on.

        Raises:
            ConfigError: A device does not report its memory, and ``memory_bytes_per_device`` is not set.
        """

        def measure() -> int:
            weights = None if model is None else read_decoder(model)[1]
            jax.block_until_ready(sources(weights))
            return free_bytes(self.mesh, weights)

        return self.config.free_bytes(measure)

    def check(self, model: Any, requests: Sequence[Request], *, free: int | None = None) -> Capacity:
        """Refuse what can never work, without compiling or launching anything.

        Args:
            model: What `lockstep.models.read_decoder` reads.
            requests: At least one request.
            free: Bytes on the device with the least free memory of all hosts; None: of this process.

        Returns:
            The capacity that `prepare` would begin with.

        Raises:
            ConfigError: A capacity, layout, model or request cannot work.
            PromptError: A prompt has a token that the model does not have.
            CapacityError: A request can never fit.
        """
        return self.predict(model, requests, free=free).sizes

    def predict(self, model: Any, requests: Sequence[Request], *, free: int | None = None) -> Sizing:
        """Return layout and capacity that `prepare` would begin with, of the arguments of `check`; launches nothing.

        Raises:
            ConfigError, PromptError, CapacityError: See `check`.
        """
        chooser, before = self._chooser(read_decoder(model), requests, free)
        return chooser.choose(before.sizing if before else None)

    def prepare(self, model: Any, requests: Sequence[Request], *, free: int | None = None) -> dict[str, str]:
        """Check the requests and compile what they need; launches nothing and talks to no other host.

        Only with ``numerics: exact`` a device of this process runs the small programs that prove it, once.

        Args:
            model: What `lockstep.models.read_decoder` reads.
            requests: At least one request.
            free: Bytes on the device with the least free memory of all hosts, agreed on; None: of this process.

        Returns:
            The digests of all programs by name, and of what decides their order. Hosts must agree on them before
            `stream`.

        Raises:
            ConfigError: A capacity, layout, model or request cannot work.
            PromptError: A prompt has a token that the model does not have.
            CapacityError: A request can never fit.
        """
        read = read_decoder(model)
        chooser, before = self._chooser(read, requests, free)
        proof = self._proof(*read)
        if self._built is not None and before is None:
            old = self._built.models.signature
            log.warning("all decode programs are compiled again: %s", describe_change(old, chooser.models.signature))
        self._built = prepare_programs(
            chooser,
            vocab_size=self.vocab_size,
            ledger=self.ledger,
            before=before,
            compile_with=self._compile_with,
        )
        if before is None and (uneven := describe_uneven_layers(chooser.models.signature)):
            log.info(uneven)
        if before is None or self._known is None:
            self._known = KnownModel(self._built.models.signature, self.mesh, self.ledger, self._compile_with)
        self._known.follow(read)
        self.decode_mesh = self._built.model.decode_mesh
        known = {id(compilation) for compilation in self._compilations}
        compiled = [program.compilation for program in self.programs.values()]
        self._compilations += [compilation for compilation in compiled if id(compilation) not in known]
        digests = {name: text for program in self.programs.values() for name, text in program.digests.items()}
        return {**digests, **self._built.sizing.schedule, **proof}

    def stream(
        self,
        model: Any,
        requests: Iterable[Request | None],
        *,
        find_stop: FindStop | None = None,
        gate: Gate | None = None,
    ) -> Generator[list[Completion], None, Counts]:
        """Generates for any number of prompts, after `prepare`: they are read as room becomes free.

        Answers leave as they are complete. The scheduler has at most ``max_prompts_per_batch`` prompts at a time, and
        reads new ones while others are answered. Cache and decode weights are freed when the iterator ends or is
        closed. Every host must take the same steps: between two of them it may do what a host can do alone, but launch
        nothing.

        Args:
            model: The model that was given to `prepare`, or a later state of it.
            requests: Read one by one, the same on every host. `prepare` must have seen requests that need as much as
                any of them: as long, with as many stop tokens, with the same sampling features. None: none for now.
            find_stop: Finds stop strings, such as ``lockstep.StopFinder(tokenizer)``; needed if a request has any.
            gate: What holds every host before each launch until all can go on (`Gate`); None where an error between two
                launches stays on its host, and its peers wait for it in the next one.

        Yields:
            After each launch that finished any prompt, all completions of those prompts, in the order of the requests.
            Nothing, again and again, while all that were read are answered and more are to come.

        Returns:
            How far the scheduler came, at the end.

        Raises:
            ConfigError: The model's shapes, dtypes or placement are not those that were prepared for, or a request has
                stop strings and there is no ``find_stop``.
            ConfigError, PromptError, CapacityError: See `prepare`; raised when the request is read.
            PeerError: With a ``gate``, something failed on a host between two launches; raised on every host.
        """
        gate = Gate() if gate is None else gate
        weights, scheduler = self._begin(model, requests, find_stop, gate)
        for _ in launch_all(self._devices(weights, gate), scheduler, gate):
            if (answered := scheduler.take_answered()) or scheduler.starved:
                yield answered
        if answered := scheduler.take_answered():
            yield answered
        return scheduler.counts

    def _begin(
        self, model: Any, requests: Iterable[Request | None], find_stop: FindStop | None, gate: Gate
    ) -> tuple[DecoderWeights, Scheduler]:
        """The steps before the first launch; where a host fails, none launches."""
        assert self._built is not None and self._known is not None, "prepare() comes before stream()"
        sizing, error = self._built.sizing, None
        try:
            read = read_decoder(model)
            if read not in self._known:
                raise ConfigError(
                    "the model's configuration, shapes, dtypes or placement are not those that the engine prepared "
                    "for. Call prepare with this model first."
                )
            scheduler = Scheduler(
                sizing.sizes,
                checked(requests, read[1].embed.shape[0], self.vocab_size),
                find_stop,
                share_prefixes=sizing.shares_prefixes,
                max_prompts=sizing.max_prompts,
                verify_costs=sizing.verify_costs,
                routed=routed_shape(self._built.model.config, sizing.sizes),
            )
        except Exception as caught:
            error = caught
        gate(error, done=True)
        return read[1], scheduler

    def _devices(self, weights: DecoderWeights, gate: Gate) -> Devices:
        """The weights in the layout of decoding, and an empty cache."""
        assert self._built is not None and self._known is not None
        model, programs = self._built.model, self._built.programs
        with gate.launch("reshard"):
            weights = self._known.move_back(weights)
            if programs.reshard is not None:
                weights = programs.reshard(sources(weights) if model.lazy else weights)
            pool = programs.new_cache()
        return Devices(programs, weights, pool, self.decode_mesh)

    def generate(
        self,
        model: Any,
        requests: Sequence[Request],
        *,
        hosts: Hosts | None = None,
        find_stop: FindStop | None = None,
        observer: Observer | None = None,
    ) -> list[Completion]:
        """Prepares, agrees with the other hosts, generates, and agrees on the result; every host makes the same call.

        Args:
            model: What `lockstep.models.read_decoder` reads; it is read once.
            requests: Requests; may be none, on every host.
            hosts: The hosts of the job; None for the current ones.
            find_stop: See `stream`.
            observer: What this host does between launches and with answers; see `Session.generate`.

        Returns:
            Completions in the order of the requests, then of their generations; the same on every host. Where the job
            is asked to end (SIGTERM), those that are not finished have ``finish_reason`` cancelled.

        Raises:
            PeerError: Preparation or generation failed on at least one host; raised on every host.
            DisagreementError: Hosts were given different requests, versions or flags, or compiled different programs.
            LaunchMismatchError: Hosts launched different programs.
        """
        session = Session(self, find_stop=find_stop)
        with (current() if hosts is None else hosts).scope("generate") as scope:
            return session.generate(scope, model, requests, facts=environment(), observer=observer).completions

    def _proof(self, config: LlamaConfig, weights: DecoderWeights) -> dict[str, str]:
        """The digest of the proof of ``numerics: exact``, by its name; none where they are fast."""
        if not config.exact:
            return {}
        dtype, platform = self.config.dtype or weights.embed.dtype, self.mesh.devices.flat[0].platform
        proof = prove_exact(config, weights.embed.shape[0], dtype, platform)
        return {} if proof is None else {AGREED: proof}

    def _chooser(
        self, read: tuple[LlamaConfig, DecoderWeights], requests: Sequence[Request], free: int | None
    ) -> tuple[Chooser, Prepared | None]:
        """Return what chooses for requests, which are checked, and what was prepared for the model before."""
        if not requests:
            raise ConfigError("there are 0 requests; the engine needs at least 1 to prepare for. Give it a prompt.")
        check_requests(requests, read[1].embed.shape[0], self.vocab_size)
        free = self.free_bytes(read) if free is None else free
        before = self._built  # of use where at most small weights are placed elsewhere (`KnownModel`)
        before = before if before and can_follow(before.models.signature, signature_of(*read)) else None
        models, excess = (before.models, before.excess) if before else (DecodeModels(self.config, *read, self.mesh), {})
        return Chooser(config=self.config, models=models, requests=requests, free=free, excess=excess), before
