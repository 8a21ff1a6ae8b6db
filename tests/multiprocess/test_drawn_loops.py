"""Loops that others could have written, drawn by a seed: the same losses, and the tokens of the model itself."""

import pytest

from tests.multiprocess.drawn_loops import run_loop
from tests.multiprocess.harness import run_processes

pytestmark = pytest.mark.multiprocess

DRAWN = range(1000, 1012)


@pytest.mark.parametrize(
    ("processes", "devices", "seed"),
    [
        *(pytest.param(2, 2, seed, marks=pytest.mark.slow) for seed in range(2)),
        *(pytest.param(1, 4, seed, marks=pytest.mark.nightly) for seed in DRAWN),
        *(pytest.param(2, 2, seed, marks=pytest.mark.nightly) for seed in DRAWN),
    ],
)
def test_a_drawn_loop_has_its_own_losses_and_its_model_s_tokens(processes, devices, seed, tmp_path):
    results = run_processes(run_loop, processes=processes, devices=devices, timeout_s=300, args=(seed, str(tmp_path)))
    for result in results:
        assert result["rounds"] == 2, result
        assert result["before"] == result["after"], result["loop"]
