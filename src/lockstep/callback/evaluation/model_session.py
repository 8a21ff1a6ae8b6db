"""The session of the model that trains: what it refuses, audits and logs."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lockstep.engine import Auditor, Engine, EngineConfig, Session, Sizing
from lockstep.errors import ConfigError
from lockstep.hosts import Hosts, Watchdog
from lockstep.models import DecoderWeights, LlamaConfig, read_decoder
from lockstep.placement import source_name, sources
from lockstep.printable import get_logger
from lockstep.text import ModelLimits, StopFinder, check_vocab, token_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = get_logger(__name__)


class ModelSession(Session):
    """The session of the model that trains, whose engine is of the mesh that the model is on.

    Args:
        audit: Whether log-probabilities are recomputed after each generation.
    """

    engine: Engine | None

    def __init__(self, config: EngineConfig, tokenizer: "PreTrainedTokenizerBase", *, audit: bool = False) -> None:
        vocab_size = token_count(tokenizer)
        super().__init__(functools.partial(Engine, config, vocab_size=vocab_size), find_stop=StopFinder(tokenizer))
        self._tokenizer, self._audit = tokenizer, audit
        self._auditor: Auditor | None = None
        self._logged_sizing: Sizing | None = None
        self._logged_compilations = 0

    def read(self, hosts: Hosts, model: Any) -> tuple[LlamaConfig, DecoderWeights]:
        """See `Session.read`.

        Raises:
            ConfigError: A weight is not where every process of the job has a part of it, has a dtype that rounds cannot
                compute with, or does not have the size of the configuration or of the tokenizer.
            UnreadableModelError: See `lockstep.models.read_decoder`.
        """
        if self.watchdog is None or self.watchdog.timeout_s != hosts.timeout_s:
            # One for all rounds: each has a thread that lives for up to ``timeout_s`` after its last watch.
            self.watchdog = Watchdog(hosts, hosts.timeout_s)
        read = read_decoder(model)
        check_vocab(self._tokenizer, read[1].embed.shape[0])
        check_processes(read[1], hosts)
        return super().read(hosts, read)

    def auditor(self) -> Auditor | None:
        """See `Session.auditor`; None without ``audit``, and before the first model."""
        engine = self.engine
        if not self._audit or engine is None:
            return None
        if self._auditor is None or self._auditor.mesh != engine.mesh:
            self._auditor = Auditor(
                engine.mesh,
                vocab_size=engine.vocab_size,
                dtype=engine.config.dtype,
                ledger=engine.ledger,
                hbm_utilization=engine.config.hbm_utilization,
            )
        return self._auditor

    def log_sizing(self, name: str) -> None:
        """Log layout and capacities, and why, and what was compiled, as far as they are new."""
        sizing = self.engine.sizing if self.engine else None
        if sizing is not None and sizing != self._logged_sizing:
            log.info("%s: %s", name, sizing.describe())
            self._logged_sizing = sizing
        compilations = self.engine.compilations if self.engine else ()
        if new := compilations[self._logged_compilations :]:
            lines = "\n".join(f"  {compilation}" for compilation in new)
            log.info("%s: compiled %d programs:\n%s", name, len(new), lines)
            self._logged_compilations = len(compilations)


def limits_of(read: tuple[LlamaConfig, DecoderWeights]) -> ModelLimits:
    """The limits of a model as it was read."""
    return ModelLimits(rows=read[1].embed.shape[0], max_seq_len=read[0].max_seq_len)


def check_processes(weights: DecoderWeights, hosts: Hosts) -> None:
    """Refuse weights that are not arrays of all processes of the job; nothing is launched.

    Raises:
        ConfigError: Names the first of them, the devices and processes that it is on, and the line that mends it.
    """
    needed = set(range(jax.process_count())) if hosts.count > 1 else {jax.process_index()}
    for path, array in jax.tree_util.tree_leaves_with_path(sources(weights)):
        name = source_name(path)
        if isinstance(array, jax.core.Tracer):
            raise ConfigError(
                f"the weight {name} is a value of a function that is being traced ({type(array).__name__}). Call the "
                "callback in the training loop, outside jit, grad, scan and the like."
            )
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ConfigError(
                f"the weight {name} is deleted: its memory was donated, as to a train step that came after. Pass the "
                "model that the last train step returned."
            )
        devices = getattr(getattr(array, "sharding", None), "device_set", None)
        if devices is None:
            raise ConfigError(
                f"the weight {name} is a {type(array).__name__} in the memory of the host, on no device. Place the "
                "model first: jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))."
            )
        local = next(iter(array.sharding.addressable_devices), None)  # others may not be asked for their memory
        if local is not None and array.sharding.memory_kind not in (None, local.default_memory().kind):
            raise ConfigError(
                f"the weight {name} is in memory of kind {array.sharding.memory_kind!r}, and programs take weights "
                "from that of the devices. Pass a copy there: jax.device_put(params, jax.tree.map(lambda array: "
                "array.sharding.with_memory_kind('device'), params))."
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ConfigError(
                f"the weight {name} is {array.dtype.name}, and rounds compute with floats. Pass what it stands for: a "
                "copy that is dequantised to bfloat16."
            )
        if array.dtype.itemsize > 4:
            raise ConfigError(
                f"the weight {name} is {array.dtype.name}, and rounds compute in at most 32 bits. Pass a copy in "
                "float32: jax.tree.map(lambda array: array.astype('float32'), params)."
            )
        processes = {device.process_index for device in devices}
        if processes != needed:
            listed = ", ".join(map(str, sorted(devices, key=lambda device: device.id)[:4])) + ", …" * (len(devices) > 4)
            raise ConfigError(
                f"the weight {name} is on {listed} of process {', '.join(map(str, sorted(processes)))}, and this job "
                f"samples on process {', '.join(map(str, sorted(needed)))}: every process must have a part of each "
                "weight, and no process a model of its own. Make the model on a mesh of the devices of all processes: "
                "jax.jit(init, out_shardings=jax.sharding.NamedSharding(lockstep.placement.make_mesh(), "
                "jax.sharding.PartitionSpec()))(key)."
            )
