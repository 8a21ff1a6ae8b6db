import ast
import dataclasses
import os
import re
import sys
import types

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.report import check_metrics, load_metric, load_metrics, measure, metric_means, pass_rates
from lockstep.report import metrics as metrics_module
from lockstep.report.metrics import BUILT_IN, EvaluationFields, exact_match
from lockstep.text import Prompt
from tests.sources import sources
from tests.unit.report import made_up

PROMPT = Prompt(id=7, text="What is 2 plus 2?", answer="four")


def row(text):
    return made_up.row(text, prompt_id=7, generation_id=2)


@pytest.fixture
def own(monkeypatch):
    module = types.ModuleType("own_metrics")
    module.length = lambda row, prompt: len(row.generated_text)
    module.leaves = lambda row, prompt: sys.exit(3)
    module.prompt = module.length
    module.number = 3
    monkeypatch.setitem(sys.modules, "own_metrics", module)
    return module


@pytest.mark.parametrize(
    ("text", "value"), [("four", 1), (" four \nWhat", 1), ("\n four", 1), ("forty", 0), ("four four", 0), ("", 0)]
)
def test_exact_match_compares_the_first_line(text, value):
    assert exact_match(row(text), PROMPT) == value


HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"


@pytest.mark.parametrize("form", ["<think>{}</think>{}", HARMONY])
def test_metrics_read_the_final_answer_not_the_reasoning_before_it(form):
    prompt = Prompt(id=7, text="What is 12 plus 7?", answer="19")

    def values(reasoning, content):
        text = form.format(reasoning, content)
        # A row, and what others make that has its text alone.
        both = [load_metric(name)(row(text), prompt) for name in ("exact_match", "gsm8k", "regex=^19$")]
        assert both[0] == load_metric("exact_match")(types.SimpleNamespace(generated_text=text), prompt)
        return both

    assert values("12 + 7 = 19; 20 is wrong.", "19") == [1, 1, 1]
    assert values("It is\n19", "Nineteen.") == [0, 0, 0]
    assert values("It is\n19", "20") == [0, 0, 0]


def test_metrics_are_found_by_name(own):
    assert load_metric("exact_match") is exact_match
    metrics = load_metrics(["exact_match", "own_metrics:length"])
    (measured,), failures = measure(metrics, [row(" four")], [PROMPT])
    assert measured.metrics == {"exact_match": 1.0, "length": 5.0} and failures == []


def test_means_are_over_the_rows_that_have_a_value():
    prompts = [PROMPT, PROMPT, Prompt(id=8, text="Hello")]
    rows, failures = measure({"exact_match": exact_match}, [row("four"), row("five"), row("four")], prompts)
    assert [each.metrics for each in rows] == [{"exact_match": 1.0}, {"exact_match": 0.0}, {"exact_match": None}]
    assert metric_means([*rows, row("four")]) == {"exact_match": 0.5} and failures == []
    assert metric_means(rows[2:]) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["bleu"], r"metric 'bleu' is not known. Use exact_match, .*gsm8k.*regex=PATTERN.*, or module:function"),
        (["own_metrics:"], r"metric 'own_metrics:' is not known"),
        (["no_such_module:f"], r"metric 'no_such_module:f': module .* could not be imported \(ModuleNotFoundError"),
        (["own_metrics:nothing"], r"module 'own_metrics' has no function 'nothing'"),
        (["own_metrics:number"], r"module 'own_metrics' has no function 'number'"),
        (["own_metrics:prompt"], r"the table already has a column 'prompt'"),
        (["exact_match", "exact_match"], r"the table already has a column 'exact_match'"),
    ],
)
def test_wrong_names_are_refused(own, names, message):
    with pytest.raises(ConfigError, match=message):
        load_metrics(names)


def test_a_metric_that_fails_loses_its_cells_and_is_named_once(own):
    own.odd = lambda row, prompt: 1 / len(row.generated_text)
    texts = ["", "four", ""]
    metrics = load_metrics(["own_metrics:odd", "own_metrics:length", "own_metrics:leaves"])
    rows, failures = measure(metrics, [row(text) for text in texts], [PROMPT] * 3)
    assert [each.metrics for each in rows] == [
        {"odd": None, "length": 0.0, "leaves": None},
        {"odd": 0.25, "length": 4.0, "leaves": None},
        {"odd": None, "length": 0.0, "leaves": None},
    ]
    assert [failure.partition(" (test_metrics.py, line ")[0] for failure in failures] == [
        "metric 'odd' failed on 2 of 3 rows, which have no value; first on prompt 7, generation 2: "
        "ZeroDivisionError: division by zero",
        "metric 'leaves' failed on 3 of 3 rows, which have no value; first on prompt 7, generation 2: SystemExit: 3",
    ]


def test_what_a_metric_changes_is_nobody_elses(own):
    own.takes = lambda row, prompt: float(prompt.fields.pop("most"))
    prompts = [dataclasses.replace(PROMPT, fields={"most": 3})]
    for _ in range(2):
        (measured,), failures = measure(load_metrics(["own_metrics:takes"]), [row("")], prompts)
        assert measured.metrics == {"takes": 3.0} and not failures


def test_what_is_not_finite_is_no_value_of_a_metric(own):
    own.nan = lambda row, prompt: np.float32("nan")
    (measured,), (failure,) = measure(load_metrics(["own_metrics:nan"]), [row("")], [PROMPT])
    assert measured.metrics == {"nan": None} and "returned nan, which is not finite" in failure


def test_what_a_metric_raises_has_no_secret(own, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-abcdef0123456789")
    own.refused = lambda row, prompt: {}[os.environ["JUDGE_API_KEY"]]
    (failure,) = measure(load_metrics(["own_metrics:refused"]), [row("")], [PROMPT])[1]
    assert "KeyError: '<redacted>' (test_metrics.py, line" in failure


def test_a_pattern_that_backtracks_loses_its_cell_alone(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.report.answers"], "MATCH_S", 0.05)
    texts = ["aa", "a" * 100 + "b", "b"]
    rows, failures = measure(load_metrics(["regex=(a|aa)+$", "length"]), [row(text) for text in texts], [PROMPT] * 3)
    assert [row.metrics["regex"] for row in rows] == [1.0, None, 0.0]
    assert [row.metrics["length"] for row in rows] == [4.0, 4.0, 4.0]
    (failure,) = failures
    assert failure.startswith(
        "metric 'regex' failed on 1 of 3 rows, which have no value; first on prompt 7, generation 2: TimeoutError: "
        "the pattern '(a|aa)+$' was not done with 101 characters within 0.05 s. "
    )


def test_each_call_of_a_metric_is_guarded(own):
    def guard():
        raise PermissionError("not here")

    rows, failures = measure(load_metrics(["length"]), [row("four")], [PROMPT], guard)
    assert rows[0].metrics == {"length": None} and "PermissionError: not here" in failures[0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["bleu"], "metric 'bleu' is not known"),
        (["module:"], "metric 'module:' is not known"),
        (["regex=("], r"regex=\(.*not a regular expression.*Correct it"),
        (["no_such_module:length", "length"], "the table already has a column 'length'"),
        (["m:tokens"], "metric 'm:tokens': the table already has a column 'tokens'. Rename or remove it."),
        (["m:logprobs"], "the table already has a column 'logprobs'"),
        (["m:round"], "the table already has a column 'round'"),
        (["m:generated_tokens"], "metric 'm:generated_tokens': 'generated_tokens' is a number that is logged anyway"),
    ],
)
def test_names_are_checked_without_importing_anything(names, message):
    check_metrics(["exact_match", "regex=a", "regex=b", "no_such_module:f"])
    with pytest.raises(ConfigError, match=message):
        check_metrics(names)


def test_pass_rates_are_of_prompts():
    """Two prompts have three answers each: one is solved once, the other never."""
    rows = [
        dataclasses.replace(row(""), prompt_id=p, generation_id=g, metrics={"ok": float(p == g == 0), "length": 3.0})
        for p in (0, 1)
        for g in range(3)
    ]
    assert pass_rates(rows) == {"pass@1/ok": pytest.approx(1 / 6), "pass@3/ok": 0.5}
    assert pass_rates(rows[::3]) == {}, "one answer each"
    assert pass_rates(rows[:-1]) == {}, "not all have as many"


def test_pass_rates_are_of_the_prompts_all_of_whose_answers_have_a_value():
    """Three prompts with two answers each: one has no value, another one of two; the third is solved once."""
    values = {0: (None, None), 1: (1.0, None), 2: (0.0, 1.0)}
    rows = [
        dataclasses.replace(row(""), prompt_id=p, generation_id=g, metrics={"ok": value})
        for p, each in values.items()
        for g, value in enumerate(each)
    ]
    assert pass_rates(rows) == {"pass@1/ok": 0.5, "pass@2/ok": 1.0}
    assert pass_rates(rows[:4]) == {}, "no prompt is left"
    half = dataclasses.replace(rows[2], metrics={"ok": 0.5})
    assert pass_rates([*rows[:2], half, *rows[3:]]) == {}, "not a metric of 0 and 1"


def test_messages_name_metrics_that_there_are():
    """A name is told from a word by its underscore, digit or @."""
    wrong = []
    for module, text in sources("metric").items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = re.findall(r"\bmetrics?:? \[?([a-z]+[_@/\d][\w@/]*)", node.value)
                wrong += [(module, name) for name in names if name not in BUILT_IN and not name.startswith("pass@")]
    assert not wrong


@pytest.mark.parametrize(
    ("prompts", "metrics", "warned"),
    [
        (["One"], ["exact_match", "length"], True),
        (["One", {"prompt": "Two", "answer": "2"}], ["exact_match", "gsm8k"], False),
        (["One"], ["length"], False),
    ],
)
def test_metrics_that_compare_with_answers_that_nobody_has_are_warned_of(prompts, metrics, warned, caplog, monkeypatch):
    monkeypatch.setattr(metrics_module, "_warn_of_answers", metrics_module._warn_of_answers.__wrapped__)
    fields = EvaluationFields(prompts=prompts, metrics=metrics)
    assert len(list(fields.stream_prompts())) == len(prompts)
    assert ("no prompt has an answer" in caplog.text) is warned and ("Set answer_field" in caplog.text) is warned
