import re
import sys
import threading
import time
from fractions import Fraction

import pytest

from lockstep.errors import ConfigError
from lockstep.report import SampleRow, answers, check_metrics, load_metrics, measure
from lockstep.report.answers import Pattern, last_number
from lockstep.text import Prompt

SOLUTIONS: dict[str, tuple[tuple[str, int | str | None], ...]] = {
    "GSM8K": (
        ("She has 3 + 4 = 7 apples.\n#### 7", 7),
        ("48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72", 72),
        ("#### 1,234", 1234),
        ("#### 1200.0", 1200),
        ("#### -5\nand some more 9", -5),
        ("####72", 72),
        ("####\n72", 72),
        ("#### 72\n\n#### Note\nI checked 3 times.", 72),
        ("#### 70\nNo, that is wrong.\n#### 72", 72),
        ("#### 48 + 24 = 72", 72),
        ("#### 72 eggs in 3 days", 72),
        ("#### 72 (48 + 24)", 72),
        ("#### 72 (= 3 * 24)", 72),
        ("#### $18 per day", 18),
        ("#### -$18", -18),
        ("#### 25%", 25),
        ("#### - 72", 72),
        ("#### **72**", 72),
        ("#### $\\boxed{72}$", 72),
        ("#### x = 72", 72),
        ("#### The answer is 72\nI checked 3 times.", 72),
        ("#### Total: 72 eggs\nI checked 3 times.", 72),
        ("#### 2 1/2 hours", "5/2"),
        ("#### 1,00,000 rupees", 100000),
        ("#### none", None),
    ),
    "headings": (
        ("#### Final Answer\n72.", 72),
        ("#### Final Answer\n72\n\nThis took 3 steps.", 72),
        ("#### Final Answer\nSo there are \\boxed{72} eggs in 3 nests.", 72),
        ("#### **Final Answer:** \\boxed{72}", 72),
        ("#### Step 1\n48 / 2 = 24\n#### Step 2\n48 + 24 = \\boxed{72}\nin 5 minutes", 72),
        ("#### Step 2: add both\nThe total is 72.", 72),
        ("#### 1. Count the eggs\nThere are 72.", 72),
        ("#### 2) **Add**\n48 + 24 = 72", 72),
        ("### Answer\n72", 72),
    ),
    "MATH": (
        ("The answer is \\boxed{42}. I checked 3 times.", 42),
        ("First \\boxed{5}, then \\boxed{7}.", 7),
        ("\\boxed{}, as you asked for: 72", 72),
        ("\\boxed{\\boxed{72}}", 72),
        ("\\boxed{72}. Or is it \\boxed{7", 72),
        ("\\fbox{72} in 3 steps", 72),
        ("So \\boxed{\\frac{1}{2}}", "1/2"),
        ("\\boxed{-\\dfrac{3}{4}}", "-3/4"),
        ("\\boxed{\\tfrac34}", "3/4"),
        ("\\boxed{2\\frac{1}{2}}", "5/2"),
        ("\\boxed{\\frac{1,200}{5}}", 240),
        ("\\boxed{72\\text{ km}^2}", 72),
        ("\\boxed{72\\ \\mathrm{cm}^{3}}", 72),
        ("\\boxed{72 m^2}", 72),
        ("\\boxed{72\\text{ eggs in 3 days}}", 72),
        ("\\boxed{\\text{72 eggs}}", 72),
        ("\\boxed{\\textbf{72}}", 72),
        ("\\boxed{72^\\circ}", 72),
        ("\\boxed{72^{\\circ}\\text{C}}", 72),
        ("\\boxed{25\\%}", 25),
        ("\\boxed{\\$1,200.50}", "1200.5"),
        ("\\boxed{1{,}200}", 1200),
        ("\\boxed{1,\\!200}", 1200),
        ("\\boxed{12\\,345\\,678}", 12345678),
        ("\\boxed{1~200}", 1200),
        ("\\boxed{x = 72}", 72),
        ("\\boxed{48 + 24 = 72 \\text{ eggs}}", 72),
        ("\\boxed{x_1 = - 72}", -72),
        ("\\boxed{- 72}", -72),
        ("\\boxed{- \\$1{,}200}", -1200),
        ("\\boxed{\\approx 72}", 72),
        ("\\boxed{7.2 \\times 10^{3}}", 7200),
        ("\\boxed{10^6}", 1000000),
        ("\\boxed{.5}", "1/2"),
        ("\\boxed{\\left(72\\right)}", 72),
        ("\\boxed{6\\sqrt{2}}", None),
        ("\\boxed{36\\pi}", None),
        ("\\boxed{36\\pi \\approx 113.1}", "113.1"),
        ("\\boxed{\\text{no solution}} for 3", None),
    ),
    "reasoning": (
        ("<think>\n#### 3?\n</think>\nThe answer is **72**.", 72),
        ("<think>\\boxed{5}, no.</think>\n\n**Final Answer**\n\\boxed{72}", 72),
        ("<think>It is \\boxed{72}.</think>\n", None),
        ("<think>It is \\boxed{72}", None),
        ("<think>72</think>Seventy-two.", None),
        ("</think><answer>72</answer>", 72),
    ),
    "text": (
        ("It costs $18.50 in all.", "18.5"),
        ("12 - 5 gives 7, so the answer is 7.", 7),
        ("from 3 to 12-5", 5),
        ("what is left is 12 -5", 5),
        ("about 1,200,000 people", 1200000),
        ("The answer is -5.", -5),
        ("temperature: −3", -3),
        ("They lose -$5.", -5),
        ("Result:\n- 72", 72),
        ("* 72", 72),
        ("Rs.72", 72),
        ("USD72", 72),
        ("US$72", 72),
        ("The area is 72 m^2", 72),
        ("an area of $72\\text{ cm}^2$", 72),
        ("72 km²", 72),
        ("72 m2", 72),
        ("It weighs 1\u202f200 g", 1200),
        ("The answer is –5.", -5),
        ("x = –5", -5),
        ("x = ‑5 and y = －7", -7),
        ("#### –5", -5),
        ("#### \u20125.5", "-5.5"),
        ("$\\boxed{– 5}$", -5),
        ("12–5", 5),
        ("pages 12 –15", 15),
        ("the years 1990–1995", 1995),
        ("a total – 72", 72),
        ("Result:\n– 72", 72),
        ("#### 1 200", 1200),
        ("#### 1\u2009200", 1200),
        ("#### 1\u2007200\u2007000", 1200000),
        ("#### $1 234 567.50", "1234567.5"),
        ("#### -1 200 dollars", -1200),
        ("#### x = 12 345", 12345),
        ("\\boxed{1 200}", 1200),
        ("\\boxed{12 345\\text{ m}}", 12345),
        ("#### 1 200/300", "5/3"),
        ("#### 1 2000", 1),
        ("#### 1234 567", 1234),
        ("#### 2 20", 2),
        ("counting 100 200 300", 300),
        ("in 2024 300 people", 300),
        ("#### 72 in 12 hours", 72),
        ("\\boxed{72 in 12}", 12),
        ("72 in 12 hours", 12),
        ("3 × 10^4 people", 30000),
        ("6.02e3 of them", 6020),
        ("They ate 1 3/4 pizzas.", "7/4"),
        ("That makes 5%.", 5),
        ("3.", 3),
        ("72nd", 72),
        ("no number here", None),
        ("", None),
        ("1/0", None),
        ("9" * 5000, None),
    ),
}
"""Solutions as they are written, and the number that each ends in."""


@pytest.mark.parametrize(
    ("text", "number"),
    [pytest.param(*case, id=f"{kind}-{place}") for kind in SOLUTIONS for place, case in enumerate(SOLUTIONS[kind])],
)
def test_the_number_that_a_solution_ends_in(text, number):
    assert last_number(text) == (None if number is None else Fraction(number))


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
    assert values_of(["perplexity"], "", mean_logprob=0.0, num_tokens=0) == {"perplexity": None}
    assert values_of([r"regex=^\d+$", "regex=seven"], "seven\n7") == {"regex": 1.0, "regex_2": 1.0}
    assert values_of(["regex=eight"], "seven") == {"regex": 0.0}


def test_math_verify_compares_expressions_as_the_library_does_in_its_own_thread():
    pytest.importorskip("math_verify")
    cases = [
        ("72", "so \\boxed{72}", 1.0),
        ("\\frac{1}{2}", "it is 0.5", 1.0),
        ("\\sqrt{2}/2", "hence $\\frac{1}{\\sqrt 2}$", 1.0),
        ("x^2+1", "\\boxed{1+x^2}", 1.0),
        ("(1,2)", "$(1,2)$", 1.0),
        ("work\n#### 1,200", "1200", 1.0),
        ("72", "\\boxed{73}", 0.0),
        ("72", "no idea", 0.0),
    ]
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(values_of(["math_verify"], text, answer=answer) for answer, text, _ in cases)
    )
    thread.start()
    thread.join()
    assert [values["math_verify"] for values in found] == [value for _, _, value in cases]
    assert values_of(["math_verify"], "72") == {"math_verify": None}


def test_math_verify_names_its_extra_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'jax-lockstep\[math\]' on every host, or use gsm8k"):
        check_metrics(["math_verify"])


def test_without_an_answer_there_is_no_value():
    assert values_of(["gsm8k", "exact_match", "length"], "7") == {"gsm8k": None, "exact_match": None, "length": 7.0}


def test_an_answer_without_a_number_fails():
    prompt = Prompt(id=4, text="p", answer="seven")
    (measured,), (failure,) = measure(load_metrics(["gsm8k"]), [row("7")], [prompt])
    assert measured.metrics == {"gsm8k": None} and "the answer of prompt 4, 'seven', has no number" in failure


SLOW, TEXT = "(a|aa)+$", "a" * 36 + "b"
"""``re`` needs some 6 s for it, ``regex`` twice that."""


@pytest.mark.slow
def test_other_threads_run_while_a_pattern_backtracks(monkeypatch):
    monkeypatch.setattr(answers, "MATCH_S", 1.0)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"'\(a\|aa\)\+\$' was not done with 37 characters within 1 s"):
            Pattern(SLOW).is_in(TEXT)
        end = time.monotonic()
    finally:
        stop.set()
        thread.join()
    assert sum(begin < at < end for at in ticks) >= 3


def test_the_limit_is_the_matching_threads_own_time(monkeypatch):
    """The clock of ``regex`` runs with every busy thread of the process: one match in three tries is in time."""
    monkeypatch.setattr(answers, "MATCH_S", 0.2)
    limits, left = [], [TimeoutError, TimeoutError, None]

    class Compiled:
        def search(self, text, timeout):
            limits.append(timeout)
            if error := left.pop(0):
                raise error

    one = Pattern("a")
    one._compiled = Compiled()
    assert one.is_in("b") is False and limits == [0.2, 0.4, 0.8]


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize(
    "source",
    [
        "x_{i}",
        r"\\frac{d}{x}",
        "a{e}b{2}c{,1}d{1,}e{}{x",
        "[[:alpha:]]",
        "[]{e]{e}[^]a]{s<=1}",
        "(?x) a{e} # x{e} [ (\n b",
        r"(?x: a{e} # [ (" + "\n) [#]{e} #",
        "(?#[)a{e}",
        r"\N{DIGIT ONE}{e}\{e}",
        "[*--][a&&b][a||b]",
        r"(?P<n>a|\[)(?P=n){e}(?(n)a|b)(?<=b)",
        r"(?i:A{E})\b\w+\s*\d{2}$",
    ],
)
def test_a_pattern_means_what_it_means_to_re(source):
    texts = [
        "x_",
        "x_{i}",
        "x",
        r"\frac{d}{x}",
        r"\frac{}{x}",
        "a{e}bbcde{}{x",
        "a",
        "l",
        "a]",
        ":]",
        "ab",
        "a{e}",
        "-]",
    ]
    texts += ["a{e}b", "a{e}#{e} #", "{{e}b{s<=1}", "1{e}{e}", "-&|", "+b|", "aa{e}ab", "a{E} b 12", "[]", "", "a\nb"]
    ours, theirs = Pattern(source, multiline=True), re.compile(source, re.MULTILINE)
    assert {text: (ours.is_in(text), ours.is_all_of(text)) for text in texts} == {
        text: (theirs.search(text) is not None, theirs.fullmatch(text) is not None) for text in texts
    }


def test_flags():
    assert Pattern("^b$", multiline=True).is_in("a\nb\nc") and not Pattern("^b$").is_in("a\nb\nc")
    assert Pattern("a.b", dot_all=True).is_all_of("a\nb") and not Pattern("a.b").is_all_of("a\nb")


@pytest.mark.parametrize("source", ["(", "[", "*a", r"\p{L}", r"\m", "(?<n>a)", "(?1)"])
def test_what_re_does_not_take_is_refused(source):
    with pytest.raises(ConfigError, match=re.escape(repr(source)) + " is not a regular expression of Python"):
        Pattern(source)


def test_beyond_ascii_a_mark_is_part_of_its_word():
    assert Pattern(r"\w+").is_all_of("हिन्दी") and not Pattern(r"\w").is_in("½")
