"""Published numbers of chips."""

import pytest

from lockstep.device import chip_named


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("TPU v4", "tpu", "TPU v4"),
        ("TPU v5", "tpu", "TPU v5p"),
        ("TPU v5 lite", "tpu", "TPU v5e"),
        ("TPU v6 lite", "tpu", "TPU v6e"),
        ("TPU v9", "tpu", "TPU v5p"),
        ("NVIDIA H100 80GB HBM3", "gpu", "H100"),
        ("NVIDIA H200", "gpu", "H200"),
        ("cpu", "cpu", "CPU"),
    ],
)
def test_chips(kind: str, platform: str, name: str) -> None:
    assert chip_named(kind, platform).name == name
