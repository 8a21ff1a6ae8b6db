"""Loops that others could have written, drawn by a seed: the same losses, and the tokens of the model itself."""

import pytest

from tests.multiprocess.drawn_loops import run_loop
from tests.multiprocess.harness import run_processes

pytestmark = pytest.mark.multiprocess

FIRST = 1000


@pytest.mark.parametrize(
    ("processes", "devices", "seeds"),
    [
        pytest.param(2, 2, range(2), marks=pytest.mark.slow),
        pytest.param(1, 4, range(FIRST, FIRST + 12), marks=pytest.mark.nightly),
        pytest.param(2, 2, range(FIRST, FIRST + 12), marks=pytest.mark.nightly),
    ],
)
def test_a_drawn_loop_has_its_own_losses_and_its_model_s_tokens(processes, devices, seeds, tmp_path):
    for seed in seeds:
        directory = tmp_path / str(seed)
        results = run_processes(
            run_loop, processes=processes, devices=devices, timeout_s=300, args=(seed, str(directory))
        )
        for result in results:
            assert result["rounds"] == 2, result
            assert result["before"] == result["after"], result["loop"]
