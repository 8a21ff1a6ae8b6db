"""``lockstep export``: a Hugging Face checkpoint of a training checkpoint."""

import dataclasses
import secrets
import time

from lockstep.config_fields import FilePath, check_fields
from lockstep.errors import ConfigError
from lockstep.hosts import DistributedConfig, Hosts, digest, giving_back_leases, leader_only, take_lease
from lockstep.models import export_hf, save_peft, save_target
from lockstep.printable import get_logger, print_lines, without_credentials
from lockstep.storage import HUB_WAIT_S
from lockstep.text import fetch_tokenizer, load_tokenizer
from lockstep.training.checkpoints.config import HF_DTYPES, CheckpointFields
from lockstep.training.checkpoints.saved_model import saved_model

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(CheckpointFields):
    """Settings of ``export``."""

    checkpoint: FilePath
    """The run directory of a training run, the directory or URL of its checkpoints, or one of them (``step-N``)."""
    output: FilePath
    """The directory or URL of the Hugging Face checkpoint; one that is there is replaced."""
    step: int | None = None
    """The number of completed steps of the checkpoint; null: the newest."""
    dtype: str | None = None
    """The float type of the tensors, ``float32`` or ``bfloat16``; null: as they are stored."""
    adapters: bool = False
    """Whether to write the adapters of a run with ``lora`` alone, as PEFT stores them, instead of the merged model."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """The settings by which the processes find each other; each of several writes files of its own."""

    def __post_init__(self) -> None:
        check_fields(self)
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


@giving_back_leases()
def export(config: ExportConfig, hosts: Hosts) -> int:
    """Export; every process makes the same call."""
    asked = [config.checkpoint, config.output, config.step, config.dtype, config.adapters, config.tokenizer]
    asked += [config.base_model]
    hosts.agree("config", {"config": digest(repr(asked))})
    start_s = time.monotonic()

    def fetch() -> bytes:
        model = saved_model(config.checkpoint, config.step, config.base_model)
        name = config.tokenizer or model.tokenizer
        return fetch_tokenizer(name, config.trust_remote_code, model.described_at)

    fetched = hosts.broadcast_from_leader("tokenizer", fetch, HUB_WAIT_S)
    with hosts.run_on_all("reading the checkpoint's metadata") as phase:
        model = saved_model(config.checkpoint, config.step, config.base_model)
        name = config.tokenizer or model.tokenizer
        tokenizer = load_tokenizer(name, config.trust_remote_code, fetched, model.described_at)
        phase.agree({"checkpoint": model.fingerprint()})
        if config.adapters and model.adapters is None:
            raise ConfigError(
                f"adapters is true, and {model.path} has none: its run trained the whole model. Remove it."
            )
        # PEFT loads the base that is named beside the adapters, which may be elsewhere; a merged model needs it now.
        base, read = (model.base(), None) if config.adapters else ("", model.reader())
    with hosts.run_on_all("output", "writing to output"):
        if hosts.is_leader:
            place = save_target(config.output, secrets.token_hex(4))
            place.check()
            take_lease(config.output, file=place.lease, fix="output")
            log.info("exporting %s", model.path)
    if read is None:
        with hosts.run_on_all("writing the adapters", "exporting"):
            if hosts.is_leader:
                assert model.adapters is not None
                lora = model.adapters.lora
                with leader_only():
                    save_peft(config.output, model.config, lora, without_credentials(base), model.pair_reader())
                print_lines(without_credentials(f"exported the adapters of {model.path} to {config.output}"))
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
        print_lines(
            f"exported {path} to {output} in {time.monotonic() - start_s:.1f} s",
            f"try next:\n  lockstep sample --hf_checkpoint {output} --prompts '[\"your prompt\"]'",
        )
    return 0
