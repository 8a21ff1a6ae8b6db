"""``lockstep export``: a Hugging Face checkpoint of a training checkpoint, on any number of processes."""

import dataclasses
import logging
import time
from collections.abc import Sequence

from lockstep.credentials import get_logger, without_credentials
from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig, Hosts, digest, leader_only, start
from lockstep.main.arguments import name_words, parse_arguments
from lockstep.models import export_hf, save_peft
from lockstep.text import fetch_tokenizer, load_tokenizer
from lockstep.training import HF_DTYPES, saved_model
from lockstep.urls import HUB_WAIT_S

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of ``export``.

    Raises:
        ConfigError: A value cannot work.
    """

    checkpoint: str
    """The run directory of a training run, the directory or URL of its checkpoints, or one of them (``step-N``)."""
    output: str
    """The directory or URL of the Hugging Face checkpoint; one that is there is replaced."""
    step: int | None = None
    """The number of completed steps of the checkpoint; null: the newest."""
    dtype: str | None = None
    """The float type of the tensors, ``float32`` or ``bfloat16``; null: as they are stored."""
    adapters: bool = False
    """Whether to write the adapters of a run with ``lora`` alone, as PEFT stores them, instead of the merged model."""
    tokenizer: str | None = None
    """The tokenizer to put beside the model: a directory, a URL or a name; null: that of the run."""
    trust_remote_code: str | None = None
    """The ``tokenizer`` again, where Python code that it brings may be run; null: none is."""
    base_model: str | None = None
    """The directory or URL of the base model of a run with ``lora``; null: the one that the run had, which must
    be beside the checkpoints."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """The settings by which the processes find each other; each of several writes files of its own."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, *HF_DTYPES):
            raise ConfigError(f"dtype is {self.dtype!r}; it must be {' or '.join(HF_DTYPES)}, or null.")
        if self.adapters and (self.dtype or self.tokenizer):
            raise ConfigError(
                "adapters is true, so dtype and tokenizer have no effect: PEFT takes both from the base "
                "model. Remove them."
            )
        for name in ("checkpoint", "output"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty. Give a directory or a URL.")


def main(arguments: Sequence[str]) -> int:
    """Export as the command line says.

    Raises:
        ConfigError: The configuration cannot work.
        PeerError: A process could not read or write.
    """
    config = parse_arguments(
        ExportConfig,
        name_words(arguments, ["checkpoint", "output"], "lockstep export CHECKPOINT OUTPUT [--key VALUE ...]"),
    )
    hosts = start(config.distributed)
    logging.basicConfig(level=logging.INFO if hosts.is_leader else logging.WARNING, format="%(name)s: %(message)s")
    return export(config, hosts)


def export(config: ExportConfig, hosts: Hosts) -> int:
    """Export; every process makes the same call.

    Raises:
        PeerError: A process could not read or write.
        DisagreementError: The processes have different configurations or find different checkpoints.
    """
    asked = [config.checkpoint, config.output, config.step, config.dtype, config.adapters, config.tokenizer]
    asked += [config.base_model]
    hosts.agree("config", {"config": digest(repr(asked))})
    start_s = time.monotonic()

    def fetch() -> bytes:
        name = config.tokenizer or saved_model(config.checkpoint, config.step, config.base_model).tokenizer
        return fetch_tokenizer(name, config.trust_remote_code)

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading the checkpoint's metadata") as phase:
        model = saved_model(config.checkpoint, config.step, config.base_model)
        tokenizer = load_tokenizer(config.tokenizer or model.tokenizer, config.trust_remote_code, fetched)
        phase.agree({"checkpoint": model.fingerprint()})
        if config.adapters and model.adapters is None:
            raise ConfigError(
                f"adapters is true, and {model.path} has none: its run trained the whole model. Remove it."
            )
        read = None if config.adapters else model.reader()  # of adapters, it looks for their base
    if hosts.is_leader:
        log.info("exporting %s", model.path)
    if read is None:
        with hosts.run_on_all("writing the adapters", "exporting"):
            if hosts.is_leader:
                assert model.adapters is not None
                adapters, base = model.adapters, config.base_model or model.adapters.base
                with leader_only():
                    save_peft(
                        config.output, model.config, adapters.lora, without_credentials(base), model.pair_reader()
                    )
                print(without_credentials(f"exported the adapters of {model.path} to {config.output}"), flush=True)
        return 0
    export_hf(
        model.skeleton(),
        read,
        config.output,
        tokenizer=tokenizer,
        dtype=config.dtype,
        vocab_size=model.vocab_size,
        hosts=hosts,
    )
    if hosts.is_leader:
        path, output = without_credentials(model.path), without_credentials(config.output)
        print(f"exported {path} to {output} in {time.monotonic() - start_s:.1f} s", flush=True)
        print(f"try next:\n  lockstep sample --hf_checkpoint {output} --prompts '[\"your prompt\"]'", flush=True)
    return 0
