"""When hooks are called."""

import time

import pytest

from lockstep.errors import ConfigError
from lockstep.training.loop.hooks import Hooks, StepInfo


def info(next_step):
    return StepInfo(step=next_step - 1, model=None, loss=1.0, step_duration=0.0)


class Recorder:
    def __init__(self):
        self.calls = []

    def on_step(self, info, force=False):
        self.calls.append((info.next_step, force))


def hooks_with(hook, every):
    hooks = Hooks()
    hooks.add(hook, every)
    return hooks


def test_before_the_first_step_objects_are_called_and_functions_are_not():
    recorder, calls = Recorder(), []
    hooks = hooks_with(recorder, 5)
    hooks.add(calls.append, 1)
    hooks.before_first_step(info(0))
    assert recorder.calls == [(0, False)] and calls == []


def test_a_hook_is_called_after_every_so_many_completed_steps():
    recorder = Recorder()
    hooks = hooks_with(recorder, 3)
    for step in range(1, 8):
        hooks.after_step(info(step))
    assert recorder.calls == [(3, False), (6, False)]


def test_hooks_are_called_in_the_order_in_which_they_were_added():
    calls = []
    hooks = hooks_with(lambda _: calls.append("first"), 1)
    hooks.add(lambda _: calls.append("second"), 1)
    hooks.after_step(info(1))
    assert calls == ["first", "second"]


@pytest.mark.parametrize("last", [6, 7])
def test_an_object_is_forced_at_the_end_whether_or_not_it_was_due(last):
    recorder = Recorder()
    hooks_with(recorder, 3).after_last_step(info(last))
    assert recorder.calls == [(last, True)]


def test_a_function_that_takes_force_gets_it_at_the_end():
    calls = []
    hooks_with(lambda info, force=False: calls.append(force), 3).after_last_step(info(6))
    assert calls == [True]


@pytest.mark.parametrize(("last", "called"), [(6, 0), (7, 1)])
def test_a_plain_function_is_called_at_the_end_unless_it_was_for_this_step(last, called):
    calls = []
    hooks_with(lambda info: calls.append(info), 3).after_last_step(info(last))
    assert len(calls) == called


def test_a_function_without_a_signature_is_called_too():
    calls = []
    hooks_with(calls.append, 2).after_last_step(info(3))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("hook", "every", "text"), [(print, 0, "every=0; it must be at least 1"), ("x", 1, "'x', which cannot be called")]
)
def test_a_hook_that_cannot_be_called_is_refused(hook, every, text):
    with pytest.raises(ConfigError, match=text):
        Hooks().add(hook, every)


def test_after_a_signal_only_hooks_that_ask_for_it_are_called():
    class Ending(Recorder):
        def after_signal(self):
            self.calls.append("signal")

    recorder, ending, calls = Recorder(), Ending(), []
    hooks = hooks_with(recorder, 1)
    hooks.add(ending, 5)
    hooks.add(calls.append, 1)
    hooks.after_signal()
    assert (recorder.calls, ending.calls, calls) == ([], ["signal"], [])


class Stateful(Recorder):
    name = "stateful"

    def state(self):
        return {"calls": len(self.calls)}

    def load_state(self, state):
        self.loaded = state


def test_states_are_kept_by_the_names_of_the_hooks():
    hooks, stateful = Hooks(), Stateful()
    hooks.add(Recorder(), 1)
    hooks.add(stateful, 1)
    assert hooks.state() == {"stateful": {"calls": 0}}
    hooks.load_state({"stateful": {"calls": 3}, "gone": {}})
    assert stateful.loaded == {"calls": 3}
    hooks.load_state({})
    assert stateful.loaded == {"calls": 3}


def test_a_hook_that_is_interrupted_says_so():
    hooks, recorder = Hooks(), Recorder()
    hooks.add(recorder, 2)
    assert hooks.after_step(info(2)) is True
    recorder.interrupted = True
    assert hooks.after_step(info(3)) is True, "it was not called"
    assert hooks.after_step(info(4)) is False


def test_the_first_reason_to_stop_is_the_one():
    hooks, recorder, plain = Hooks(), Recorder(), Recorder()
    hooks.add(plain, 1)
    hooks.add(recorder, 1)
    recorder.stop_reason = None
    assert hooks.stop_reason is None
    recorder.stop_reason = "loop in 24 of 32 answers"
    assert hooks.stop_reason == recorder.stop_reason


def test_a_hook_sees_how_long_those_before_it_took():
    class Named(Recorder):
        name = "inference_eval"

        def on_step(self, info, force=False):
            time.sleep(0.01)
            assert dict(info.hook_seconds) == {}

    hooks, found = hooks_with(Named(), 2), []
    hooks.add(lambda info: found.append(dict(info.hook_seconds)), 1)
    hooks.after_step(info(1))
    hooks.after_step(info(2))
    assert found[0] == {} and found[1].keys() == {"inference_eval"} and found[1]["inference_eval"] >= 0.009


@pytest.mark.parametrize("call", ["before_first_step", "after_step", "after_last_step"])
def test_after_a_hook_that_is_interrupted_no_other_is_called_for_a_resume_calls_all(call):
    hooks, first, interrupted, last = Hooks(), Recorder(), Recorder(), Recorder()
    for hook in (first, interrupted, last):
        hooks.add(hook, 1)
    assert getattr(hooks, call)(info(4)) is True
    interrupted.interrupted = True
    assert getattr(hooks, call)(info(4)) is False
    assert [len(hook.calls) for hook in (first, interrupted, last)] == [2, 2, 1]
