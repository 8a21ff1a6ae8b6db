"""An alarm on the leader ends the run on every host at the same step: in lockstep's loop, and in one of the user's."""

import pytest

import lockstep
from lockstep.errors import AlarmError
from tests import tiny
from tests.multiprocess.harness import run_processes

STEPS, TOLD = 6, 3


class Asking:
    """A hook whose leader wants the run to end from a step on."""

    def __init__(self, hosts):
        self._hosts, self.steps, self.stop_reason = hosts, [], None

    def on_step(self, info, force=False):
        self.steps.append(info.next_step)
        if self._hosts.is_leader and info.next_step == TOLD:
            self.stop_reason = "rollout: loop in 24 of 32 answers"


def own_loop(hosts, directory):
    """A model of random weights says bytes that are no characters: an alarm in its second round."""
    config = lockstep.InferenceEvalConfig(
        prompts=[f"What is {number} plus 7?" for number in range(16)],
        eval_every=1,
        max_new_tokens=48,
        temperature=0.0,
        page_size=8,
        alarms=lockstep.report.AlarmsConfig(on_alarm="stop", warm_up=0),
    )
    trainer = tiny.make_trainer("auto", STEPS, hosts)
    model = tiny.init_model(trainer)
    callback = lockstep.SampleCallback(config, tiny.tokenizer(), hosts=hosts, output_dir=directory)
    done = []
    try:
        for step in range(1, STEPS + 1):
            callback(tiny.Info(step, model))
            done.append(step)
            callback.finish()  # a report is made behind a queue, and this loop is faster
    except AlarmError as error:
        return done, str(error), error.on_every_process, hosts.ledger.count
    return done, "", False, hosts.ledger.count


def own_trainer(hosts, directory):
    from lockstep.training import CheckpointerConfig

    trainer = tiny.make_trainer(
        "auto", STEPS, hosts, checkpointer=CheckpointerConfig(every=100), log_dir=directory, run_id="run"
    )
    hook = Asking(hosts)
    trainer.add_hook(hook)
    result = trainer.train(tiny.init_model(trainer), tiny.rows())
    return [hook.steps, result.completed_steps, result.alarmed, result.stopped_by, result.exit_code, result.checkpoint]


def body(hosts, directory):
    return own_loop(hosts, f"{directory}/samples"), own_trainer(hosts, directory)


@pytest.mark.slow
def test_all_hosts_end_at_the_same_step(tmp_path):
    first, second = run_processes(body, processes=2, devices=2, args=(str(tmp_path),))
    assert first == second
    (done, error, everywhere, _), (steps, completed, alarmed, signal, code, checkpoint) = first
    assert done == [1, 2] and everywhere
    assert "inference_eval: step 2: invalid_utf8 in 32 of 32 answers" in error and error.endswith("(alarms.on_alarm)")
    assert (steps, completed, alarmed, signal, code) == ([0, 1, 2, 3], TOLD + 1, True, None, 1)
    assert checkpoint.endswith(f"{TOLD + 1}")
