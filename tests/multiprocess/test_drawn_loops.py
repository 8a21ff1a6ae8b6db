"""Loops that others could have written, drawn by a seed: the same losses, and the tokens of the model itself."""

import json

import pytest

from tests.multiprocess.drawn_loops import run_loop, run_part_loop
from tests.multiprocess.harness import run_command, run_processes

pytestmark = pytest.mark.multiprocess

JOB_SIZES = ((1, 4), (2, 2))
"""Processes, and devices of each."""


def draws(slow: range, nightly: range) -> pytest.MarkDecorator:
    """Tests with seeds: of two processes those in ``slow``, of each size of job those in ``nightly``."""
    return pytest.mark.parametrize(
        ("processes", "devices", "seed"),
        [
            *(pytest.param(2, 2, seed, marks=pytest.mark.slow) for seed in slow),
            *(pytest.param(*size, seed, marks=pytest.mark.nightly) for size in JOB_SIZES for seed in nightly),
        ],
    )


def assert_untouched(results):
    """Each process had both rounds, and the losses of a loop without a callback."""
    for result in results:
        assert result["rounds"] == 2, result
        assert result["before"] == result["after"], result


@draws(range(1), range(1000, 1012))
def test_a_drawn_loop_has_its_own_losses_and_its_model_s_tokens(processes, devices, seed, tmp_path):
    results = run_processes(run_loop, processes=processes, devices=devices, timeout_s=300, args=(seed, str(tmp_path)))
    assert_untouched(results)


@pytest.mark.nightly  # in make slow: the loops above
@draws(range(1), range(2000, 2012))
def test_a_drawn_loop_on_some_devices_or_without_jit_works_or_is_refused_by_check_as_by_a_round(
    processes, devices, seed, tmp_path
):
    results = run_processes(
        run_part_loop, processes=processes, devices=devices, timeout_s=300, args=(seed, str(tmp_path))
    )
    refused = [result for result in results if "texts" in result]
    assert len(refused) in (0, len(results)), results
    assert_untouched([result for result in results if "texts" not in result])
    for result in refused:
        assert result["texts"] == results[0]["texts"], results
        check, first_round = result["texts"]
        assert check == first_round, result
        if result["alone"]:
            assert "the weight embed is on" in check and "every process must have a part of each" in check, result
        else:
            named = [f" of layer {number} is placed on " in check for number in result["frozen"]]
            assert any(named) and "of process 0" in check and "jax.device_put(" in check, result


@draws(range(0), range(3000, 3012))  # in make slow: test_joining.py
def test_a_callback_may_be_made_and_hosts_looked_at_before_the_job_is_joined_or_after(
    processes, devices, seed, tmp_path
):
    command = ["python", "-m", "tests.multiprocess.drawn_loops", str(seed), str(tmp_path)]
    run = run_command(command, processes=processes, devices=devices, timeout_s=300)
    assert run.code == 0, run.output
    lines = [line.partition("RESULT ")[2] for line in run.output.splitlines() if "RESULT " in line]
    assert len(lines) == processes, run.output
    assert_untouched([json.loads(line) for line in lines])
