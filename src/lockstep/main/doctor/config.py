"""The settings of doctor, and those of the run that it looks after."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.hosts import digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Settings of ``doctor``; ``--config_path`` and all other keys are those of the run that it looks after.

    Raises:
        ConfigError: A value cannot work.
    """

    buckets: list[str] = dataclasses.field(default_factory=list)
    """Directories or URLs to write to, read from and delete in, beside those of the run's configuration."""
    json: str | None = None
    """The file that the leader writes the report to; null: none."""
    calibrate: str | None = None
    """The file that every process writes the measured numbers of the devices to, for ``lockstep plan --calibration``
    and the key ``calibration``; null: none."""
    self_test: bool = False
    """Train a small model with and without samples, in every layout and with a failure on one host. ``--self-test``
    does the same."""
    self_test_s: float = 300.0
    """Seconds after which the self-test begins no other layout."""
    measure: bool = True
    """Measure memory bandwidth, operations and all-reduces, which launches programs on all devices."""
    timeout_s: float = 120.0
    """Seconds that the processes may take to find each other, and that any wait or device call may last."""
    reach_s: float = 15.0
    """Seconds that buckets, W&B and the tokenizer may take to answer."""

    def __post_init__(self) -> None:
        for name in ("self_test_s", "timeout_s", "reach_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than 0 seconds. Leave it out.")
        if self.calibrate is not None and not self.measure:
            raise ConfigError(
                "calibrate is given and measure is false, so there is nothing to write. Leave measure out."
            )


WRITTEN: Final = frozenset("base_path hf_save_path output output_dir log_dir host_data_parallel_output_dir".split())
"""The keys of a configuration that name a place to write to; every other URL is read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """The services, files and devices that a run uses.

    Args:
        written: The URLs that it writes to.
        read: The URLs that it reads, which may have wildcards.
        tokenizer: Its tokenizer; None where it is not known.
        trust_remote_code: The tokenizer whose code may be run; None where none is.
        checkpoint: The checkpoint that it starts from; None where there is none.
        wandb: The settings of its W&B tracker; None where it has none.
        log_dir: The parent of the run directory.
        distributed: The settings of ``trainer.distributed``.
        config_digest: A digest of the configuration but for ``distributed``; ``none`` where there is none.
    """

    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    tokenizer: str | None = None
    trust_remote_code: str | None = None
    checkpoint: str | None = None
    wandb: Mapping[str, Any] | None = None
    mesh_shape: str = "auto"
    log_dir: str = "runs"
    distributed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config_digest: str = "none"


def read_needs(config: DoctorConfig, values: Mapping[str, Any]) -> RunNeeds:
    """Read what a run reaches for from its configuration.

    Args:
        config: What doctor is asked.
        values: The values of the run's configuration as in its YAML file; may be empty.
    """
    trainer = _mapping(values.get("trainer"))
    trackers = trainer.get("tracker", values.get("tracker"))
    each = [_mapping(one) for one in (trackers if isinstance(trackers, list) else [trackers])]
    urls = [(key, text) for key, text in _texts(values) if re.match(r"\w+://", text)]
    distributed = _mapping(trainer.get("distributed", values.get("distributed")))
    checkpoint = values.get("initialize_from_hf", values.get("hf_checkpoint"))
    tokenizer = values.get("tokenizer") or values.get("hf_checkpoint")  # the one beside it
    # A tokenizer and a checkpoint are looked at by their own readers.
    own = (tokenizer, checkpoint)
    return RunNeeds(
        written=tuple(dict.fromkeys([*config.buckets, *(text for key, text in urls if key in WRITTEN)])),
        read=tuple(dict.fromkeys(text for key, text in urls if key not in WRITTEN and text not in own)),
        tokenizer=tokenizer if isinstance(tokenizer, str) else None,
        trust_remote_code=values.get("trust_remote_code"),
        checkpoint=checkpoint if isinstance(checkpoint, str) else None,
        wandb=next((one for one in each if one.get("type") == "wandb"), None),
        mesh_shape=str(trainer.get("mesh_shape", "auto")),
        log_dir=str(trainer.get("log_dir", "runs")),
        distributed=distributed,
        config_digest=digest(repr(_without_distributed(values))) if values else "none",
    )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a configuration, with the key that it is under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)


def _without_distributed(value: Any) -> Any:
    """A configuration without what tells each process its own number."""
    if isinstance(value, Mapping):
        return {name: _without_distributed(inner) for name, inner in value.items() if name != "distributed"}
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
