"""Every kind of reward, on answers as models write them."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from lockstep.configuration import decode_config
from lockstep.errors import ConfigError
from lockstep.report import load_metric
from lockstep.text import Prompt
from lockstep.training import TrainGrpoConfig
from lockstep.training.data.records import BadRow
from lockstep.training.rl.rewards import (
    ExactMatchReward,
    FormatReward,
    FunctionReward,
    Gsm8kReward,
    LengthReward,
    MathVerifyReward,
    OverlongReward,
    RegexReward,
    check_rewards,
    labels,
)
from tests.unit.report.made_up import row
from tests.unit.training.rl.made_up import prompt


async def judge(answer, question):
    await asyncio.sleep(0)
    return 0.25


def value(config, text="", answer="#### 2", max_new_tokens=100, **of_row):
    return config.build(max_new_tokens)(row(text, **of_row), prompt(answer))


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("She has 18 eggs left, so 9 * 2 = 18.\n#### 18", "9 * 2 = 18\n#### 18", 1),
        ("#### 18.00", "#### 18", 1),
        ("#### $1,080", "#### 1080", 1),
        ("#### 18 dollars", "#### 18", 1),
        ("The answer is \\boxed{18}. I checked it 3 times.", "#### 18", 1),
        ("so \\boxed{\\frac{1}{2}}", "#### 0.5", 1),
        ("In all there are 18", "#### 18", 1),
        ("#### 17\nNo, it is 18", "#### 18", 0),
        ("First #### 17, then #### 18", "#### 18", 1),
        ("#### ", "#### 18", 0),
        ("#### eighteen", "#### 18", 0),
        ("18 of 20 are left", "#### 18", 0),
        ("it is 10-18", "#### 18", 1),
        ("the result: -18", "#### 18", 0),
        ("", "#### 18", 0),
    ],
)
def test_gsm8k_finds_the_final_number(text, answer, expected):
    assert value(Gsm8kReward(), text, answer) == expected


def test_math_verify_compares_expressions_and_names_an_answer_without_one():
    pytest.importorskip("math_verify")
    assert value(MathVerifyReward(), "so \\boxed{\\frac{2}{4}}", "1/2") == 1
    assert value(MathVerifyReward(), "so \\boxed{3}", "1/2") == 0
    MathVerifyReward().check_answer("\\sqrt{2}")
    with pytest.raises(BadRow, match="has the answer '…', which has no expression for the reward math_verify"):
        MathVerifyReward().check_answer("…")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" thirty-one", 1),
        ("#### thirty-one\n", 1),
        ("thirty-one\nthirty", 1),
        ("thirty\nthirty-one", 0),
        ("Thirty-one", 0),
        ("#### thirty", 0),
        ("It is ##### thirty-one \n#", 1),
    ],
)
def test_exact_match_compares_the_final_answer_as_text(text, expected):
    reference = "29 and 2\n#### thirty-one"
    assert value(ExactMatchReward(), text, reference) == expected
    metric = load_metric("exact_match")  # which means the same
    assert metric(SimpleNamespace(generated_text=text), Prompt(id=0, text="29 + 2?", answer=reference)) == expected
    assert value(ExactMatchReward(ignore_case=True), text.upper(), "#### thirty-one") == (
        expected or text == "Thirty-one"
    )


def test_exact_match_takes_as_many_lines_as_the_reference_has():
    assert value(ExactMatchReward(), "one\ntwo\nthree", "one\ntwo") == 1
    assert value(ExactMatchReward(), "one\nthree", "one\ntwo") == 0 == value(ExactMatchReward(), "one", "one\ntwo")


def test_a_metric_without_a_reference_answer_is_a_reward():
    repeated = FunctionReward(function="repetition", weight=-0.5)
    assert value(repeated, "a b c d a b c d", "") == pytest.approx(0.2) and repeated.label == "repetition"


def test_rewards_read_the_final_answer_and_format_all_that_was_written():
    right, wrong = "<think>no 17</think>#### 18", "<think>#### 18</think>eighteen"
    for config in (Gsm8kReward(), ExactMatchReward(), RegexReward(pattern="18")):
        assert value(config, right, "#### 18") == 1 and value(config, wrong, "#### 18") == 0
    assert value(FormatReward(pattern="<think>.*</think>.*"), right) == 1


def test_format_is_of_the_whole_answer_and_regex_of_a_part():
    assert value(FormatReward(), "2 and 3 is 5.\n#### 5") == value(FormatReward(), "#### 5") == 1
    assert value(FormatReward(), "2 and 3 is 5") == value(FormatReward(), "#### 5\nor 6") == 0
    assert value(FormatReward(pattern="<a>.*</a>"), "<a>x\ny</a>") == 1
    assert value(FormatReward(pattern="<a>.*</a>"), "<a>x</a> and more") == 0
    assert value(RegexReward(pattern="^so"), "first\nso on") == 1
    assert value(RegexReward(pattern="^so"), "first so on") == 0
    # The dot matches a newline in the one, the line's ends in the other.
    assert value(FormatReward(pattern="a$.b"), "a\nb") == value(RegexReward(pattern="a.b"), "a\nb") == 0


@pytest.mark.parametrize("kind", [FormatReward, RegexReward])
def test_a_pattern_that_backtracks_fails_with_its_limit(monkeypatch, kind):
    monkeypatch.setattr(sys.modules["lockstep.report.answers"], "MATCH_S", 0.05)
    with pytest.raises(TimeoutError, match=r"'\(a\|aa\)\+\$' was not done with 101 characters within 0.05 s"):
        value(kind(pattern="(a|aa)+$"), "a" * 100 + "b")


def test_length_is_a_share_of_the_limit():
    assert value(LengthReward(), num_tokens=25) == 0.25


def test_overlong_is_equation_13():
    """arXiv 2503.14476, with a limit of 100 tokens and a buffer of 20: ((100 - 20) - |y|) / 20 beyond 80."""
    config = OverlongReward(buffer=20)
    found = [value(config, num_tokens=n) for n in (1, 80, 81, 90, 100)]
    assert found == pytest.approx([0, 0, -0.05, -0.5, -1])


def test_a_function_of_the_users_own():
    config = FunctionReward(function=f"{__name__}:judge")
    assert config.label == "judge" and asyncio.run(config.build(10)(row(""), prompt())) == 0.25
    with pytest.raises(ConfigError, match="'no_such_module' could not be imported"):
        FunctionReward(function="no_such_module:judge").build(10)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Gsm8kReward(weight=float("nan")), "gsm8k.weight is nan; it must be finite"),
        (lambda: Gsm8kReward(default=float("inf")), "gsm8k.default is inf; it must be finite"),
        (lambda: RegexReward(pattern="("), r"regex.pattern: '\(' is not a regular expression"),
        (lambda: FormatReward(pattern="["), r"format.pattern: '\[' is not a regular expression"),
        (lambda: OverlongReward(buffer=0), "overlong.buffer is 0; it must be at least 1"),
        (lambda: OverlongReward(buffer=101).build(100), "overlong.buffer is 101 and rollout.max_new_tokens is 100"),
        (lambda: FunctionReward(function="judge"), "function is 'judge'; it must be module:function"),
        (lambda: check_rewards([]), "rewards is empty"),
        (lambda: check_rewards([LengthReward(weight=0)]), "rewards has weights of 0 only"),
        (lambda: check_rewards([FunctionReward(function="mine:reward")]), "'reward'.*sum.*name: my_reward"),
        (lambda: check_rewards([Gsm8kReward(), LengthReward(name="num_tokens")]), "'num_tokens'.*another value"),
    ],
)
def test_settings_that_cannot_work(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_several_of_a_kind_have_numbered_names():
    rewards = [RegexReward(pattern="a"), Gsm8kReward(), RegexReward(pattern="b"), RegexReward(pattern="c", name="last")]
    assert labels(rewards) == ["regex", "gsm8k", "regex_2", "last"]


def test_they_are_read_by_their_type():
    values = {
        "model": {"type": "llama"},
        "tokenizer": "t",
        "data": {},
        "rewards": [{"type": "gsm8k", "weight": 2.0}, {"type": "overlong", "buffer": 64, "default": -1}],
    }
    config = decode_config(TrainGrpoConfig, values, "here")
    assert list(config.rewards) == [Gsm8kReward(weight=2.0), OverlongReward(buffer=64, default=-1)]
