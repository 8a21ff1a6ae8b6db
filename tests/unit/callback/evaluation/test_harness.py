"""The harness with three tasks of our own and made-up answers: what is asked, scores, rows."""

import math
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lockstep.callback.evaluation import TasksConfig
from lockstep.callback.evaluation.harness import Harness, HarnessThread
from lockstep.errors import ConfigError, LaunchMismatchError, LockstepError
from lockstep.text import ModelLimits
from lockstep.types import Completion, FinishReason
from tests import tiny
from tests.tasks import NAMES, QUESTIONS, write_tasks

pytest.importorskip("lm_eval")
LIMITS = ModelLimits(rows=tiny.vocab_size(), max_seq_len=tiny.CONFIG.max_seq_len)
SAID = ["nineteen", "forty two", "seven"]
"""Answers to the questions; the second is wrong."""
CHOSEN = [0, 0, 1]
"""The choice of each question that has the larger probability; the third is wrong."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def answer(request):
    """A completion that says what is made up above; each token of a prompt has a log-probability of -1 or -2."""
    number, tokens, text = request.prompt_id, (), tiny.tokenizer()
    if not request.params.prompt_logprobs:
        tokens = tuple(text.encode(SAID[number] + "zz of it", add_special_tokens=False))
    each = -1.0 if number % 2 == CHOSEN[number // 2 % 3] else -2.0
    count = len(request.prompt_tokens) if request.params.prompt_logprobs else 0
    return Completion(
        prompt_id=number,
        generation_id=0,
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        finish_reason=FinishReason.STOP,
        prompt_logprobs=(None, *(each,) * (count - 1))[:count],
        prompt_top_logprobs=((), *(((0, -0.1),),) * (count - 1))[:count],
    )


@pytest.fixture(scope="module")
def run(directory):
    asked = []

    def ask(requests, last):
        asked.append((requests, last))
        return [answer(request) for request in requests]

    config = TasksConfig(names=NAMES, task_dir=directory)
    return Harness(config, tiny.tokenizer()).run(ask, 7, LIMITS), asked


def test_the_last_set_of_requests_is_known_as_the_last(run):
    _, asked = run
    assert [(len(requests), last) for requests, last in asked] == [(3, False), (6, False), (3, True)]
    params = [requests[0].params for requests, _ in asked]
    assert (params[0].max_new_tokens, params[0].stop) == (5, ("zz",)), "<eos> is no text: its id ends the answer"
    assert tiny.tokenizer().eos_token_id in params[0].stop_token_ids
    assert [each.prompt_logprobs for each in params] == [False, True, True]


def test_scores(run):
    found, _ = run
    assert {name: set(scores) for name, scores in found.scores.items()} == {
        "own_words": {"exact_match", "exact_match_stderr"},
        "own_choice": {"acc", "acc_stderr"},
        "own_text": {"word_perplexity"},
    }
    deviation = math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2)
    for name, metric in (("own_words", "exact_match"), ("own_choice", "acc")):
        assert found.scores[name][metric] == pytest.approx(2 / 3)
        assert found.scores[name][f"{metric}_stderr"] == pytest.approx(deviation / math.sqrt(3))
    scalars = found.scalars(7)
    assert scalars["eval/own_choice/acc"] == pytest.approx(2 / 3) and scalars["eval/own_text/step"] == 7
    assert (scalars["eval/requests"], scalars["eval/truncated_requests"]) == (12, 0)
    assert found.describe().startswith("own_words exact_match 0.6667, own_choice acc 0.6667, own_text word_perplexity")


def test_rows(run):
    found, _ = run
    assert [row.task for row in found.rows] == [name for name in NAMES for _ in QUESTIONS]
    words, choices = found.rows[:3], found.rows[3:6]
    for number, row in enumerate(words):
        assert (row.step, row.question_id, row.prompt) == (7, number, QUESTIONS[number]["question"])
        assert (row.generated_text, row.answer) == (SAID[number], QUESTIONS[number]["right"])
    assert [row.metrics["exact_match"] for row in words] == [1.0, 0.0, 1.0]
    assert [row.generated_text for row in choices] == [" nineteen", " forty", " eight"]
    assert words[0].to_dict() == {
        "step": 7,
        "task": "own_words",
        "question_id": 0,
        "prompt": "What is 12 plus 7?",
        "generated_text": "nineteen",
        "answer": "nineteen",
        "exact_match": 1.0,
    }


def test_a_task_or_a_harness_that_is_missing_is_named(directory, monkeypatch):
    config = TasksConfig(names=["own_words", "no_such_task"], task_dir=directory)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path, **_: _Index())
    with pytest.raises(ConfigError, match="'no_such_task', which is not a task of lm-evaluation-harness, nor in"):
        Harness(config, tiny.tokenizer()).check()
    with pytest.raises(ConfigError, match=r"task_dir is 'no/such', which is not a directory"):
        Harness(TasksConfig(names=["own_words"], task_dir="no/such"), tiny.tokenizer()).check()
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"pip install 'jax-lockstep\[eval\]'"):
        Harness(config, tiny.tokenizer()).check()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (
            '"{{qestion}}"',
            "task .*words.yaml cannot be loaded: UndefinedError: 'qestion' is undefined. Correct the task",
        ),
        (
            "!function asks.first",
            r"the questions of task own_words cannot be made: KeyError: .* \(asks\.py, line 2\)\. Co",
        ),
    ],
)
def test_a_task_that_cannot_ask_is_named(directory, tmp_path, wrong, error):
    text = (Path(directory) / "words.yaml").read_text()
    (tmp_path / "words.yaml").write_text(text.replace('"{{question}}"', wrong))
    (tmp_path / "asks.py").write_text(
        f"def first(doc):\n    return {{{QUESTIONS[0]['question']!r}: 'q'}}[doc['question']]\n"
    )
    config = TasksConfig(names=[str(tmp_path / "words.yaml")])
    with pytest.raises(ConfigError, match=error):
        Harness(config, tiny.tokenizer()).run(None, 0, LIMITS)


class _Index:
    """The harness's own tasks, without reading thousands of files."""

    task_index = {"own_words": None}


class Done:
    """What the thread reported at its end."""

    def __init__(self):
        self.found = []

    def __call__(self, result, error):
        self.found.append((result, error))


def started(work):
    done = Done()
    return HarnessThread(work, done), done


def test_questions_are_answered_and_the_result_comes_after_the_last():
    thread, done = started(lambda ask: [ask(["a"], False), ask(["b"], True)])
    first = thread.next_question(60)
    assert (first.requests, first.last) == (["a"], False)
    thread.answer(["A"])
    second = thread.next_question(60)
    assert (second.requests, second.last) == (["b"], True)
    thread.answer(["B"])
    assert thread.wait(60) and done.found == [([["A"], ["B"]], None)]


def test_work_that_ends_after_a_question_that_was_not_its_last_releases_the_hosts():
    thread, done = started(lambda ask: ask(["a"], False))
    thread.next_question(60)
    thread.answer(["A"])
    last = thread.next_question(60)
    assert (last.requests, last.last, done.found) == ([], True, [])
    thread.answer([])
    assert thread.wait(60) and done.found == [(["A"], None)]


def test_no_question_yet_is_none():
    free = threading.Event()
    thread, _ = started(lambda ask: free.wait(60) and ask(["a"], True))
    assert thread.next_question(0.01) is None and thread.alive
    free.set()
    assert thread.next_question(60).requests == ["a"]
    thread.give_up()
    assert thread.wait(60)


def test_an_error_before_the_last_answers_is_raised_where_questions_are_awaited():
    def work(ask):
        ask(["a"], False)
        raise KeyError("no such field")

    thread, done = started(work)
    thread.next_question(60)
    thread.answer([])
    with pytest.raises(KeyError, match="no such field"):
        thread.next_question(60)
    assert thread.wait(60) and done.found == []


def test_an_error_after_the_last_answers_is_reported():
    thread, done = started(lambda ask: ask(["a"], True)[7])
    thread.next_question(60)
    thread.answer([])
    assert thread.wait(60)
    ((result, error),) = done.found
    assert result is None and isinstance(error, IndexError)


def test_work_that_is_given_up_says_nothing():
    asked = []
    thread, done = started(lambda ask: asked.append(ask(["a"], False)))
    thread.next_question(60)
    thread.give_up()
    assert thread.wait(60) and asked == done.found == []


@pytest.mark.parametrize(
    ("work", "message"), [(lambda ask: None, "the tasks have no questions"), (lambda ask: exit(3), "SystemExit: 3")]
)
def test_work_that_ends_without_a_question_is_an_error(work, message):
    with pytest.raises(LockstepError, match=message):
        started(work)[0].next_question(60)


def test_it_asks_nothing_after_its_last_question():
    thread, done = started(lambda ask: [ask(["a"], True), ask(["b"], True)])
    thread.next_question(60)
    thread.answer(["A"])
    assert thread.wait(60) and "asked again after its last question" in str(done.found[0][1])


def test_a_launch_in_it_raises():
    with pytest.raises(LaunchMismatchError, match="was launched inside leader-only work"):
        started(lambda ask: jax.block_until_ready(jnp.ones(3) + 1))[0].next_question(20)
