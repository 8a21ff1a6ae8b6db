import types

import numpy as np
import pytest

from lockstep.models import LlamaConfig
from lockstep.placement import make_mesh
from lockstep.training.loop.throughput import Meter, Throughput, flops_per_token, peak_flops
from tests import tiny

CONFIG = LlamaConfig(
    hidden_dim=8, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, max_seq_len=64
)


def test_operations_per_token():
    projections = 8 * 16 + 2 * 8 * 8 + 16 * 8  # q, k and v, o
    weights = 2 * (projections + 3 * 8 * 32) + 8 * 100
    assert flops_per_token(CONFIG, 100, 10) == 6 * weights + 12 * 2 * 16 * 10


def test_frozen_weights_have_no_gradient():
    whole = flops_per_token(CONFIG, 100, 10)
    attention = 12 * 2 * 16 * 10
    assert flops_per_token(CONFIG, 100, 10, adapters=50) == (whole - attention) * 4 / 6 + 6 * 50 + attention


def test_a_cpu_has_no_peak_and_so_no_mfu():
    assert peak_flops(make_mesh()) == 0
    batch = {"tokens": np.zeros((4, 2, 8), np.int32)}
    found = Meter(make_mesh(), (tiny.CONFIG, tiny.numpy_weights())).step(batch, step_s=1.5, wait_s=0.5)
    assert found.tokens_per_s == 32.0 and found.mfu is None and "throughput/mfu" not in found.metrics()


def test_mfu_is_of_published_chips():
    device = types.SimpleNamespace(device_kind="TPU v5p", platform="tpu")
    mesh = types.SimpleNamespace(devices=np.array([device, device]))
    assert peak_flops(mesh) == 2 * 459e12
    batch = {"tokens": np.zeros((4, 8), np.int32)}
    found = Meter(mesh, (tiny.CONFIG, tiny.numpy_weights())).step(batch, step_s=1e-6, wait_s=1e-6)
    assert found.mfu == pytest.approx(32 * flops_per_token(tiny.CONFIG, 64, 8) / 2e-6 / 918e12)
    mesh.devices[1] = types.SimpleNamespace(device_kind="TPU v99", platform="tpu")
    assert peak_flops(mesh) == 0


def test_what_a_tracker_and_the_log_get():
    found = Throughput(rows=4, tokens=1000, step_s=1.5, wait_s=0.5, mfu=0.4512)
    assert found.metrics() == {
        "throughput/step_duration_s": 1.5,
        "throughput/examples_per_s": 4 / 1.5,
        "throughput/data_wait_s": 0.5,
        "throughput/tokens_per_s": 500.0,
        "throughput/mfu": 0.4512,
    }
    assert str(found) == "500 tokens/s  MFU 45.1%  data wait 25%"
    assert str(Throughput(rows=4, tokens=None, step_s=1.0, wait_s=0.0, mfu=None)) == "data wait 0%"
