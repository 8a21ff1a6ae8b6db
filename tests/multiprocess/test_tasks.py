"""Tasks of lm-evaluation-harness inside training, on two processes: losses, launches, scores, and what may go wrong."""

import contextlib
import io
import os
import threading
from unittest import mock

import pytest

from lockstep.callback import InferenceEvalConfig, SampleCallback
from lockstep.callback.evaluation import TasksConfig
from lockstep.report import read_jsonl
from lockstep.report.trackers import NoopTracker
from tests import tiny
from tests.faults.bodies import told
from tests.multiprocess.harness import cached, run_processes
from tests.multiprocess.launches import assert_same_launches
from tests.tasks import NAMES, QUESTIONS, write_tasks

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

GOOD, RAISES, HANGS, STILL_HANGS, CANNOT_SCORE, GOOD_AGAIN = STEPS = range(1, 7)
"""What the harness does after each step."""


class Recorder(NoopTracker):
    def __init__(self):
        self.scalars, self.rows = {}, []

    def log(self, metrics, *, step):
        self.scalars.setdefault(step, {}).update(metrics)

    def log_rows(self, name, rows, *, step):
        self.rows += [[name, row.to_dict()] for row in rows if name != "inference_eval/samples"]


class Faulty:
    """The harness of the leader, which does something else after some steps."""

    def __init__(self, harness):
        self.harness, self.release = harness, threading.Event()

    def check(self):
        self.harness.check()

    def run(self, ask, step, length):
        if step in (GOOD, GOOD_AGAIN):
            return self.harness.run(ask, step, length)
        requests = tiny.requests(lengths=(3, 5))
        if step == HANGS:
            self.release.wait(600)
        ask(requests, step == CANNOT_SCORE)
        raise KeyError("no such field in the data")


def train(hosts, directory, tasks):
    """A run with a round of samples and of tasks after each step; without both where ``tasks`` is None."""
    trainer, losses, tracker = tiny.make_trainer("auto", len(STEPS), hosts), [], Recorder()
    trainer.add_hook(lambda info: losses.append(float(info.loss).hex()))
    found = {"losses": losses}
    if tasks is not None:
        config = InferenceEvalConfig(
            eval_every=1, prompts=["one"], max_new_tokens=3, timeout_s=60.0, tasks=TasksConfig(names=NAMES, **tasks)
        )
        callback = SampleCallback(config, tiny.tokenizer(), tracker=tracker, output_dir=directory, hosts=hosts)
        rounds = callback.tasks
        faulty = rounds._harness = Faulty(rounds._harness)

        def before(info):
            rounds.max_seconds = 1.0 if info.next_step == HANGS else 60.0
            if info.next_step == CANNOT_SCORE:
                faulty.release.set()
                assert rounds.wait(60)

        trainer.add_hook(before)
        trainer.add_hook(callback)
    trainer.train(tiny.init_model(trainer), tiny.rows())
    if tasks is not None:
        found |= {"rounds": rounds.rounds, "skipped": rounds.skipped_rounds, "samples": callback.rounds}
        found |= {"scalars": tracker.scalars, "rows": tracker.rows, "errors": callback.report_errors}
    return found


def body_tasks(hosts, directory, tasks):
    from tqdm import tqdm  # its bars, which the harness shows, start a thread

    # The harness sets variables of the environment when it is imported.
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(tqdm, "monitor_interval", 0),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        plain = train(hosts, directory, None)
        with told() as log, assert_same_launches(hosts):
            found = train(hosts, directory, {"task_dir": tasks})
    return found | {"plain": plain["losses"], "log": log.getvalue()}


@cached
def results(directory):
    return run_processes(
        body_tasks, args=(str(directory / "run"), write_tasks(directory / "tasks")), devices=2, timeout_s=170
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return directory / "run", results(directory)


def test_training_is_as_without_tasks_whatever_the_harness_does(run):
    for process in run[1]:
        assert process["losses"] == process["plain"] and len(process["losses"]) == len(STEPS)
        assert (process["rounds"], process["skipped"], process["samples"]) == (3, 3, 6)


def test_the_scores_of_a_round_are_in_the_tracker_and_its_answers_in_the_file(run):
    directory, (leader, other) = run
    for step in (GOOD, GOOD_AGAIN):
        scalars = leader["scalars"][str(step)]
        assert {"eval/own_words/exact_match", "eval/own_choice/acc", "eval/own_text/word_perplexity"} <= set(scalars)
        assert scalars["eval/requests"] == 4 * len(QUESTIONS) and scalars["eval/own_words/step"] == step
    rows = read_jsonl(directory / "tasks.jsonl")
    assert [(row["step"], row["task"]) for row in rows] == [
        (step, name) for step in (GOOD, GOOD_AGAIN) for name in NAMES for _ in QUESTIONS
    ]
    assert leader["rows"] == [["eval/tasks", row] for row in rows]
    assert other["rows"] == [] and other["scalars"] == {}


def test_what_goes_wrong_is_said_and_counted(run):
    _, (leader, other) = run
    skipped = [line for line in leader["log"].splitlines() if "are skipped on every host" in line]
    assert [int(line.split("after step ")[1].split()[0]) for line in skipped] == [RAISES, HANGS, STILL_HANGS]
    assert "KeyError: 'no such field in the data'" in skipped[0]
    assert "has lasted 1 s (tasks.max_seconds) and the harness has not asked its next question" in skipped[1]
    assert "the harness still works on an earlier round" in skipped[2]
    assert f"tasks after step {CANNOT_SCORE} could not be scored" in leader["log"] and leader["errors"] == 1
    assert leader["scalars"][str(STILL_HANGS)]["inference_eval/skipped_task_rounds"] == 3
    assert "tasks" not in other["log"]
