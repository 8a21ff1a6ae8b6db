"""Loops that others could have written, drawn by a seed: the same losses, and the tokens of the model itself."""

import pytest

from tests.multiprocess.drawn_loops import run_loop
from tests.multiprocess.harness import run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

JOB_SIZES = ((1, 4), (2, 2))
"""Processes, and devices of each."""


@pytest.mark.parametrize(
    ("processes", "devices", "seed"),
    [
        (2, 2, 0),
        *(pytest.param(*size, seed, marks=pytest.mark.nightly) for size in JOB_SIZES for seed in range(1000, 1012)),
    ],
)
def test_a_drawn_loop_has_its_own_losses_and_its_model_s_tokens(processes, devices, seed, tmp_path):
    results = run_processes(run_loop, processes=processes, devices=devices, timeout_s=300, args=(seed, str(tmp_path)))
    for result in results:
        assert result["rounds"] == 2, result
        assert result["before"] == result["after"], "the losses of a loop without a callback"
