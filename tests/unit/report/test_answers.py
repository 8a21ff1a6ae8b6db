from fractions import Fraction

import pytest

from lockstep.errors import ConfigError
from lockstep.report import SampleRow, load_metrics, measure
from lockstep.report.answers import last_number
from lockstep.text import Prompt


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", 7),
        ("#### 1,234", 1234),
        ("#### -5\nand some more 9", -5),
        ("It costs $18.50 in all.", Fraction("18.5")),
        ("The answer is \\boxed{42}. I checked 3 times.", 42),
        ("So \\boxed{\\frac{1}{2}}", Fraction(1, 2)),
        ("12 - 5 gives 7, so the answer is 7.", 7),
        ("from 3 to 12-5", 5),
        ("about 1,200,000 people", 1200000),
        ("temperature: −3", -3),
        ("That makes 5%.", 5),
        ("3.", 3),
        ("#### none", None),
        ("no number here", None),
        ("", None),
        ("1/0", None),
    ],
)
def test_the_number_that_a_solution_ends_in(text, number):
    assert last_number(text) == number


def row(text, **values):
    given = {"num_tokens": 7, "finish_reason": "stop", "mean_logprob": -1.0, **values}
    return SampleRow(round=0, prompt_id=0, generation_id=0, prompt="p", generated_text=text, **given)


def values_of(metrics, text, answer=None, **values):
    (measured,), failures = measure(
        load_metrics(metrics), [row(text, **values)], [Prompt(id=0, text="p", answer=answer)]
    )
    assert not failures
    return measured.metrics


def test_built_in_metrics():
    assert values_of(["gsm8k"], "so it is 1,200.0 dollars", answer="2 * 600 = 1200\n#### 1200") == {"gsm8k": 1.0}
    assert values_of(["gsm8k"], "so it is 12", answer="#### 1200") == {"gsm8k": 0.0}
    assert values_of(["gsm8k"], "I do not know", answer="#### 1200") == {"gsm8k": 0.0}
    assert values_of(["exact_match"], " seven\nand more", answer="seven") == {"exact_match": 1.0}
    assert values_of(["length"], "any", num_tokens=7) == {"length": 7.0}
    assert values_of(["repetition"], "a b c d e f") == {"repetition": 0.0}
    assert values_of(["repetition"], "a b c d " * 4)["repetition"] == pytest.approx(1 - 4 / 13)
    assert values_of(["repetition"], "short") == {"repetition": 0.0}
    assert values_of(["perplexity"], "x", mean_logprob=-1.0) == {"perplexity": 2.718}
    assert values_of(["perplexity"], "x", mean_logprob=-1e9)["perplexity"] > 1e300
    assert values_of([r"regex=^\d+$", "regex=seven"], "seven\n7") == {"regex": 1.0, "regex_2": 1.0}
    assert values_of(["regex=eight"], "seven") == {"regex": 0.0}


def test_wrong_metrics_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"regex=\(.*not a regular expression.*Correct it"):
        load_metrics(["regex=("])
    with pytest.raises(ConfigError, match=r"metric 'bleu' is not known.*gsm8k.*regex=PATTERN"):
        load_metrics(["bleu"])


def test_without_an_answer_there_is_no_value():
    assert values_of(["gsm8k", "exact_match", "length"], "7") == {"gsm8k": None, "exact_match": None, "length": 7.0}


def test_an_answer_without_a_number_fails():
    prompt = Prompt(id=4, text="p", answer="seven")
    (measured,), (failure,) = measure(load_metrics(["gsm8k"]), [row("7")], [prompt])
    assert measured.metrics == {"gsm8k": None} and "the answer of prompt 4, 'seven', has no number" in failure
