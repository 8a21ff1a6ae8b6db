"""How a run is set up."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.training import CheckpointerConfig, TrainerConfig


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"train_batch_size": 0}, "train_batch_size is 0; it must be at least 1"),
        ({"num_train_steps": 0}, "num_train_steps is 0"),
        ({"per_device_parallelism": 0}, "per_device_parallelism is 0.*-1"),
        ({"seed": -1}, "seed is -1"),
        ({"mp": "f31"}, "mp is 'f31'"),
        ({"run_id": "a/b"}, "run_id is 'a/b'"),
        ({"log_dir": "gs://bucket/runs"}, "log_dir is 'gs://bucket/runs'.* must be a directory"),
    ],
)
def test_settings_out_of_range(values, text):
    with pytest.raises(ConfigError, match=text):
        TrainerConfig(**values)


class ShapeOfMesh:
    """What `TrainerConfig.microbatches` looks at."""

    def __init__(self, dp, fsdp, *, kind="cpu", processes=1, cp=1):
        self.shape = {"dp": dp, "fsdp": fsdp, "tp": 1, "cp": cp}
        device = functools.partial(SimpleNamespace, device_kind=kind, platform=kind.split()[0].lower())
        self.devices = np.array([device(process_index=index % processes) for index in range(dp * fsdp)])


def test_batches_that_do_not_divide():
    config = TrainerConfig(train_batch_size=24, per_device_parallelism=2)
    assert config.microbatches(ShapeOfMesh(2, 2)) == 3
    for together in (-1, "auto", 6):
        assert TrainerConfig(train_batch_size=24, per_device_parallelism=together).microbatches(ShapeOfMesh(2, 2)) == 1
    with pytest.raises(ConfigError, match="train_batch_size is 24.*multiple of 16, e.g. 16 or 32"):
        config.microbatches(ShapeOfMesh(2, 8))
    with pytest.raises(ConfigError, match=r"does not divide the 3 rows.*Use one of \[1, 3\], or -1"):
        config.microbatches(ShapeOfMesh(2, 4))


@pytest.mark.parametrize(
    ("length", "mp", "mesh", "parts"),
    [
        (2048, "p=f32,c=bf16", ShapeOfMesh(2, 2, kind="TPU v5p", processes=4), 6),  # 2,550 tokens: 459e12 / 180e9
        (256, "p=f32,c=bf16", ShapeOfMesh(2, 2, kind="TPU v5p"), 1),
        (256, "p=f32,c=bf16", ShapeOfMesh(4, 1, kind="TPU v5p"), 6),  # no weight is gathered
        (2048, "p=f32,c=bf16", ShapeOfMesh(2, 2, kind="TPU v6 lite"), 4),  # 5,100 tokens
        (2048, "f32", ShapeOfMesh(2, 2, kind="TPU v5p"), 4),  # four bytes of each weight take twice as long
        (2048, "p=f32,c=bf16", ShapeOfMesh(2, 2, kind="TPU v5p", cp=4), 2),
        (96, "f32", ShapeOfMesh(2, 2), 4),  # 200 tokens on CPU
        (96, "f32", ShapeOfMesh(2, 2, processes=2), 4),  # gathers within a process
        (96, "f32", ShapeOfMesh(2, 2, processes=4), 1),  # 800 tokens between processes
        (20, "f32", ShapeOfMesh(2, 2), 1),
    ],
)
def test_a_microbatch_of_packed_rows_has_work_for_the_time_in_which_weights_are_gathered(length, mp, mesh, parts):
    for together in (-1, "auto"):
        config = TrainerConfig(train_batch_size=48, per_device_parallelism=together, mp=mp)
        assert config.microbatches(mesh, packed_length=length) == parts
        assert config.microbatches(mesh) == 1
    config = TrainerConfig(train_batch_size=48, per_device_parallelism=1, mp=mp)
    assert config.microbatches(mesh, packed_length=length) == 12


@pytest.mark.parametrize(
    ("values", "missing"),
    [({"run_id": "mine"}, "trainer.checkpointer"), ({"checkpointer": CheckpointerConfig()}, "trainer.run_id")],
)
def test_a_resume_that_could_find_nothing_is_refused(values, missing):
    with pytest.raises(ConfigError, match=f"resume is must, but {missing} is null"):
        TrainerConfig(resume="must", **values)
