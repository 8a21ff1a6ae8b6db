"""Rows and scores of tasks, whatever a task's own code does while its answers are scored."""

import json
import re
from pathlib import Path

import pytest

from lockstep.callback.evaluation import TasksConfig
from lockstep.callback.evaluation.harness import Harness
from lockstep.text import ModelLimits, decode
from lockstep.types import Completion, FinishReason
from tests import tiny

pytest.importorskip("lm_eval")
PAGE = Path(__file__).parents[4] / "docs" / "evaluation.md"
DATA = [
    {"question": "What is 4 plus 6?", "answer": "ten", "choices": ["one", "ten"], "sentence": "Tim drank _ of it."},
    {"question": "What is 3 plus 2?", "answer": "five", "choices": ["one", "five"], "sentence": "Ann ate _ of it."},
]
HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICE = 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: choices\ndoc_to_target: 1\n'
CONTEXTS = (
    "output_type: multiple_choice\ndoc_to_text: 1\n"
    "doc_to_choice: \"{{[sentence.replace('_', choices[0]), sentence.replace('_', choices[1])]}}\"\n"
    'doc_to_target: "Who knows why?"\n'
)
WORDS = (
    'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    "generation_kwargs: {until: [zz], max_gen_toks: 5, do_sample: false}\n"
)
LIKELIHOOD = 'output_type: loglikelihood\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
CODE = """\
import math, sys
def overflow(items): return math.exp(1e9)
def leave(items): sys.exit(3)
def first(items): return items[0]
def broken_results(doc, results): raise KeyError("no_such_field")
def words(doc, results): return {"exact_match": 1.0, "no_numbers": "a text"}
def exit_results(doc, results): sys.exit(3)
def nan_results(doc, results): return {"exact_match": math.nan}
def no_results(doc, results): return {}
def said(items): return "good"
def return_nothing(doc, results): pass
"""


SAID = "ten"


def metrics(*names, aggregation="mean"):
    entries = (f"{{metric: {name}, aggregation: {aggregation}, higher_is_better: true}}" for name in names)
    return f"metric_list: [{', '.join(entries)}]\n"


def likely(text):
    """The log-probability of each token of a text: right choices are likely after a question, "one" without any."""
    if "?" not in text and "of it" not in text:
        return -0.01 if "one" in text else -30.0
    return -1.0 if "ten" in text or "five" in text else -5.0


def answers(requests, last):
    for request in requests:
        text = decode(tiny.tokenizer(), request.prompt_tokens)
        words = tiny.tokenizer().encode(SAID, add_special_tokens=False)
        said = () if request.params.prompt_logprobs else tuple(words)
        count = len(request.prompt_tokens) if request.params.prompt_logprobs else 0
        yield Completion(
            prompt_id=request.prompt_id,
            generation_id=0,
            tokens=said,
            logprobs=(-0.5,) * len(said),
            finish_reason=FinishReason.STOP,
            prompt_logprobs=(None, *(likely(text),) * (count - 1))[:count],
            prompt_top_logprobs=((), *(((0, -0.1),),) * (count - 1))[:count],
        )


@pytest.fixture
def run(tmp_path):
    def run_tasks(**files):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in DATA))
        (tmp_path / "own.py").write_text(CODE)
        for name, text in files.items():
            head = "" if text.startswith("group") else HEAD.format(name=name, data=data)
            (tmp_path / f"{name}.yaml").write_text(head + text)
        groups = [name for name, text in files.items() if text.startswith("group")]
        config = TasksConfig(names=groups or list(files), task_dir=str(tmp_path))
        return Harness(config, tiny.tokenizer()).run(
            lambda *asked: list(answers(*asked)), 3, ModelLimits(rows=tiny.vocab_size(), max_seq_len=200)
        )

    return run_tasks


@pytest.mark.parametrize("names", [("acc",), ("acc", "acc_mutual_info"), ("acc_mutual_info",)])
def test_a_row_shows_the_choice_that_the_model_prefers_after_the_question(run, names):
    results = run(choice=CHOICE + metrics(*names))
    assert [row.generated_text for row in results.rows] == [" ten", " five"]
    assert [row.prompt for row in results.rows] == [record["question"] for record in DATA]
    if "acc" in names:
        assert [row.metrics["acc"] for row in results.rows] == [1.0, 1.0]


def test_a_row_shows_the_preferred_context_where_contexts_differ(run):
    results = run(contexts=CONTEXTS + metrics("acc"))
    assert [row.prompt for row in results.rows] == ["Tim drank ten of it.", "Ann ate five of it."]
    assert [row.generated_text for row in results.rows] == [" Who knows why?"] * 2
    assert [row.metrics["acc"] for row in results.rows] == [1.0, 1.0]


BROKEN = {
    "aggregation": (WORDS + metrics("exact_match", aggregation="!function own.overflow"), "exact_match", "Overflow"),
    "perplexity": (LIKELIHOOD + metrics("perplexity", aggregation="perplexity"), "perplexity", "OverflowError"),
    "exit": (WORDS + metrics("exact_match", aggregation="!function own.leave"), "exact_match", "SystemExit: 3"),
    "question": (WORDS + "process_results: !function own.broken_results\n" + metrics("exact_match"), "exact_match",
                 "KeyError: 'no_such_field'"),
    "question_exit": (WORDS + "process_results: !function own.exit_results\n" + metrics("exact_match"), "exact_match",
                      "SystemExit: 3"),
    "no_aggregation": (WORDS + "process_results: !function own.words\n" + metrics("exact_match"), "no_numbers",
                       "TypeError"),
    "filter": (WORDS + "filter_list: [{name: none, filter: [{function: take_first_k, k: 9}]}]\n"
               + metrics("exact_match"), "", "AssertionError"),
    "nan": (WORDS + "process_results: !function own.nan_results\n" + metrics("exact_match"), "exact_match",
            "its aggregation over 2 questions is nan, no finite number. Correct"),
    "text": (WORDS + metrics("exact_match", aggregation="!function own.said"), "exact_match",
             "is 'good', no finite number. Correct"),
    "none": (WORDS + "process_results: !function own.return_nothing\n" + metrics("exact_match"), "",
             "scoring a question returned a NoneType, no mapping. Correct"),
    "nothing": (WORDS + "process_results: !function own.no_results\n" + metrics("exact_match"), "", "it has no score"),
}  # fmt: skip
"""Tasks whose code fails after the answers: the text, the metric that is named, the error that is named."""


@pytest.mark.parametrize("kind", BROKEN)
def test_a_score_that_fails_costs_neither_answers_nor_other_scores(run, monkeypatch, kind):
    if kind == "perplexity":
        monkeypatch.setitem(globals(), "likely", lambda text: -500.0)
    text, metric, error = BROKEN[kind]
    results = run(broken=text, choice=CHOICE + metrics("acc"))
    assert [(row.task, row.question_id) for row in results.rows] == [
        (task, number) for task in ("broken", "choice") for number in range(2)
    ]
    if text.startswith("output_type: generate"):
        assert [row.generated_text for row in results.rows[:2]] == ["ten", "ten"]
    (failure,) = results.failures
    assert failure.startswith("task broken: ") and metric in failure and error in failure, failure
    assert set(results.scores["choice"]) == {"acc", "acc_stderr"}
    assert metric not in results.scores.get("broken", {})
    assert results.scalars(3)["eval/failed_scores"] == 1
    if kind == "no_aggregation":
        assert results.scores["broken"]["exact_match"] == 1.0, "the task's other metric has its score"


def test_a_group_has_no_mean_without_one_of_its_tasks(run):
    group = (
        "group: both\ntask: [broken, words]\n"
        "aggregate_metric_list: [{metric: exact_match, aggregation: mean, weight_by_size: true}]\n"
    )
    text = WORDS + metrics("exact_match")
    results = run(broken=BROKEN["aggregation"][0], words=text, both=group)
    assert results.scores["words"]["exact_match"] == 0.5 and not {"broken", "both"} & set(results.scores)
    assert results.failures[-1] == "group both: it has no exact_match, because a task of it has none"


def test_the_pages_own_task_scores_right_answers_that_begin_with_a_space(run, monkeypatch, caplog):
    monkeypatch.setitem(globals(), "SAID", " ten")
    (page,) = (text for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "task:" in text[:6])
    text = page[page.index("output_type") :]
    assert run(words=text).scores["words"]["exact_match"] == 0.5 and not caplog.records
    without = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("filter_list"))
    assert run(words=without).scores["words"]["exact_match"] == 0
    assert "task words: exact_match is 0, but 1 of 2 answers are the right ones with spaces around them" in caplog.text
