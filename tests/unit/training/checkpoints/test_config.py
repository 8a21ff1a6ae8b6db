from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.training import CheckpointerConfig
from lockstep.training.checkpoints.config import KeepConfig


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"every": 0}, r"checkpointer\.every is 0; it must be at least 1"),
        ({"timeout_s": 0}, r"checkpointer\.timeout_s is 0; it must be more than 0"),
        ({"every": 4, "keep": {"every": 6}}, r"keep\.every is 6, but there is a checkpoint every 4 steps only"),
        ({"every": None}, r"every and checkpointer\.every_minutes are both null"),
        ({"every_minutes": 0}, r"checkpointer\.every_minutes is 0; it must be more than 0"),
        (
            {"every": None, "every_minutes": 5, "keep": {"every": 6}},
            r"keep\.every is 6, but checkpointer\.every is null",
        ),
        ({"grace_s": 0}, r"checkpointer\.grace_s is 0; it must be more than 0"),
        ({"keep": {"newest": 0}}, r"keep\.newest is 0; it must be at least 1"),
    ],
)
def test_values_that_cannot_work(values, text):
    with pytest.raises(ConfigError, match=text):
        CheckpointerConfig(**{key: KeepConfig(**one) if key == "keep" else one for key, one in values.items()})


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("checkpoints", "runs/mine/checkpoints"),
        ("/disk/ckpt", "/disk/ckpt/mine"),
        ("gs://bucket/ckpt/", "gs://bucket/ckpt/mine"),
    ],
)
def test_where_the_checkpoints_are(base, path):
    assert CheckpointerConfig(base_path=base).path(Path("runs/mine"), "mine") == path
