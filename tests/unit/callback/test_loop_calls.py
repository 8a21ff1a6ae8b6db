"""What a training loop may pass, and that it calls from one thread."""

import gc
import math
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.callback.loop_calls import CalledSteps, completed_steps
from lockstep.errors import ConfigError, LockstepError
from tests import tiny
from tests.unit.callback.test_sample_callback import Counting


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (SimpleNamespace(next_step=1, eval_model=object()), None),
        (SimpleNamespace(step=1, eval_model=object()), None),
        (SimpleNamespace(next_step=1, model=object()), None),
        (SimpleNamespace(model=object()), "an object of SimpleNamespace has neither next_step nor step"),
        (SimpleNamespace(step=1), "an object of SimpleNamespace has neither eval_model nor model"),
    ],
)
def test_an_info_has_one_of_two_names_for_the_step_and_for_the_model(info, text):
    callback = Counting(eval_every=1)
    if text is None:
        callback(info)
        assert callback.steps == [1]
    else:
        with pytest.raises(ConfigError, match=text):
            callback(info)


@pytest.mark.parametrize("step", [2, 2.0, np.int64(2), np.array(2), jnp.int32(2)])
def test_a_step_is_a_whole_number_of_any_kind(step):
    assert completed_steps(SimpleNamespace(step=step)) == 2


@pytest.mark.parametrize("step", [None, "2", -1, 1.5, math.nan, math.inf, np.array([2]), jnp.ones(4)])
def test_a_step_that_is_no_whole_number_is_refused_by_its_value(step):
    with pytest.raises(
        ConfigError, match=r"step is .*; it must be one whole number from 0.* Pass int\(step\), outside jit"
    ):
        completed_steps(SimpleNamespace(step=step))


@pytest.mark.parametrize(
    ("config", "tokenizer", "text"),
    [
        ({"prompts": ["one"]}, None, r"configuration of a callback is a dict; it must be a lockstep.InferenceEvalConf"),
        ("run.yaml", None, r"configuration of a callback is a str; .* Write lockstep.InferenceEvalConfig\("),
        (InferenceEvalConfig(prompts=["one"]), tiny.TOKENIZER, r"tokenizer of a callback is a str; .* Load it: transf"),
        (
            InferenceEvalConfig(prompts=["one"]),
            None,
            r"tokenizer of a callback is a NoneType; it must be one of transf",
        ),
    ],
)
def test_what_a_callback_cannot_be_made_of_is_named(config, tokenizer, text):
    with pytest.raises(ConfigError, match=text):
        SampleCallback(config, tokenizer)
    with pytest.raises(
        ConfigError, match=r"tracker of a callback is a builtin_.*; .* Wrap it: lockstep.report.WandbTr"
    ):
        SampleCallback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer(), tracker=print)


def test_callbacks_of_two_names_need_two_directories(tmp_path):
    def made(name, directory):
        return SampleCallback(InferenceEvalConfig(prompts=["one"]), tiny.tokenizer(), name=name, output_dir=directory)

    first, again, second = made("a", tmp_path), made("a", tmp_path), made("b", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"output_dir of callback 'b' is that of 'a' \(.*Give each .* a directory of"):
        made("b", tmp_path)
    del first, again, second
    gc.collect()
    made("b", tmp_path)


@pytest.mark.parametrize(
    ("every", "steps", "texts"),
    [
        (2, [1, 2, 3, 4], []),
        (4, [2, 4, 6, 8], []),
        (2, [0, 2, 4, 2, 2, 4], []),
        (
            6,
            [4, 8, 12, 16, 20],
            ["after step 4, then after step 8, and a round was due after step 6 (eval_every is 6)"],
        ),
        (2, [3, 6, 9], ["after step 3, then after step 6, and a round was due after step 4"]),
        (10, [107, 114], ["a round was due after step 110"]),  # a run that goes on from step 100
    ],
)
def test_a_round_between_two_calls_is_said_to_be_missing_once(every, steps, texts):
    calls = CalledSteps(every)
    said = [text for step in steps if (text := calls.passed_over(step))]
    assert len(said) == len(texts) and all(expected in text for expected, text in zip(texts, said, strict=True))


def test_a_loop_without_a_round_hears_why(caplog):
    for steps, words in [
        ([], ""),
        ([1, 2], "the last call is after step 2, and no call was after a multiple of eval_"),
    ]:
        caplog.clear()
        callback = SampleCallback(InferenceEvalConfig(prompts=["one"], eval_every=3), tiny.tokenizer())
        for step in steps:
            callback(SimpleNamespace(step=step, model=None))
        callback.finish()
        assert words in caplog.text and bool(words) == bool(caplog.text)
    callback = Counting(eval_every=2)
    callback(SimpleNamespace(step=1, model=None))
    callback(SimpleNamespace(step=3, model=None))
    assert "inference_eval: the loop calls after step 1, then after step 3" in caplog.text


def test_a_traced_step_is_refused():
    with pytest.raises(ConfigError, match=r"next_step is .*; it must be one whole number"):
        jax.jit(lambda step: completed_steps(SimpleNamespace(next_step=step)))(1)


def test_a_second_thread_inside_a_callback_is_refused_and_the_first_goes_on():
    inside, leave = threading.Event(), threading.Event()

    class Slow(Counting):
        def _round(self, step, model):
            inside.set()
            assert leave.wait(60)
            super()._round(step, model)

    callback = Slow(eval_every=1)
    first = threading.Thread(target=callback, args=(tiny.Info(1, None),))
    first.start()
    assert inside.wait(60)
    for call in (lambda: callback(tiny.Info(2, None)), lambda: callback.check(None), callback.finish):
        with pytest.raises(LockstepError, match="another thread is inside this callback. Call it from one"):
            call()
    leave.set()
    first.join(60)
    assert callback.steps == [1]
