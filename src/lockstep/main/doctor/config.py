"""What ``lockstep doctor`` is asked."""

import dataclasses

from lockstep.errors import ConfigError


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
