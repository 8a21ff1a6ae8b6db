"""Rounds have settings of their own, whatever those of the training loop are."""

import contextlib

import jax
import pytest

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.hosts.config import OPTIONS
from lockstep.placement import make_mesh
from lockstep.placement.device import own_settings
from lockstep.report.trackers import NoopTracker
from tests import tiny
from tests.unit.callback.test_sample_callback import Recorder


class Leaves(NoopTracker):
    def log(self, metrics, *, step):
        raise SystemExit("the tracker gives up")


SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "no jit": lambda: jax.disable_jit(True),
    "no tracing": lambda: jax.no_tracing(True),
    "NaN": lambda: jax.debug_nans(True),
}


@pytest.mark.slow
def test_rounds_are_the_same_under_every_setting_of_the_training_loop_and_a_tracker_that_exits_is_counted():
    """Programs are compiled once; the settings of the loop are there again after each round."""
    mesh = make_mesh("1,1,1", jax.devices()[:1])
    model = tiny.CONFIG, tiny.placed_weights(mesh, vocab=tiny.vocab_size())
    rows = {}
    for name, setting in {"none": contextlib.nullcontext, **SETTINGS}.items():
        config = InferenceEvalConfig(
            prompts=["one", "two"], eval_every=1, max_new_tokens=6, seed=3, audit=True, on_error="raise"
        )
        tracker = Recorder() if name != "none" else Leaves()
        with setting():
            before = {option: getattr(jax.config, option, None) for option in OPTIONS}
            callback = SampleCallback(config, tiny.tokenizer(), tracker=tracker)
            callback.check(model)
            for step in (1, 2):
                callback(tiny.Info(step, model))
            callback.finish()
            assert {option: getattr(jax.config, option, None) for option in OPTIONS} == before
        assert callback.rounds == 2 and callback.skipped_rounds == 0, name
        if name == "none":
            assert callback.report_errors == 2
            continue
        rows[name] = [row.generated_text for _, _, table in tracker.rows for row in table]
    assert len(set(map(tuple, rows.values()))) == 1, rows


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_of_the_loop_are_there_again_after_an_error(setting):
    with SETTINGS[setting]():
        before = {option: getattr(jax.config, option, None) for option in OPTIONS}
        with pytest.raises(KeyError), own_settings():
            assert not jax.config.jax_disable_jit
            assert jax.numpy.ones((2, 3), float).dtype == "float32"
            assert (jax.numpy.ones((2, 3)) + jax.numpy.ones(3, "bfloat16")).shape == (2, 3)
            raise KeyError
        assert {option: getattr(jax.config, option, None) for option in OPTIONS} == before
