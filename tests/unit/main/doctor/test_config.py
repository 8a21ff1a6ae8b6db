"""Settings of doctor that cannot work say why."""

import pytest

from lockstep.errors import ConfigError
from lockstep.main.doctor.config import DoctorConfig


def test_seconds_are_positive():
    with pytest.raises(ConfigError, match=r"reach_s is 0; it must be more than 0 seconds"):
        DoctorConfig(reach_s=0)


def test_a_calibration_needs_a_measurement():
    with pytest.raises(ConfigError, match="calibrate is given and measure is false"):
        DoctorConfig(calibrate="chip.json", measure=False)
