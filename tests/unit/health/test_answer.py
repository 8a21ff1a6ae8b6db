"""The states of an answer, each where it is and where it only seems to be; one answer to several prompts; shares."""

import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.health import AnsweredPrompt, Health, Share, State, Vocabulary, measure_health, measure_round
from lockstep.health.answer import LOOP_LONG, LOOP_TOKENS, compressed_share, distinct_ngrams
from lockstep.text import Prompt
from lockstep.types import Completion, FinishReason
from tests import tiny

END, SPECIAL = 1, 2
CHATML = Vocabulary(special=frozenset({SPECIAL}), ends=frozenset({END}), parts=frozenset({"<think>", "</think>"}))
HARMONY = Vocabulary(
    ends=frozenset({END}), parts=frozenset({"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"})
)
PIECE = re.compile(r"\s?[^\W\u3040-\u9fff]+|\s|[\u3040-\u9fff]|[^\w\s]")
QUESTION = "What is the capital of France?"


def pieces(text):
    """A token for each word, sign, and character of Chinese and Japanese."""
    return tuple(100 + zlib.crc32(piece.encode(errors="replace")) % 100_000 for piece in PIECE.findall(text))


def answered(text, prompt=QUESTION, *, reason=FinishReason.STOP, tokens=None, **more):
    """An answer that the model ended with its end token, if it was not cut."""
    written = pieces(text) if tokens is None else tuple(tokens)
    written += (END,) * (reason == FinishReason.STOP)
    completion = Completion(
        prompt_id=0, generation_id=0, tokens=written, logprobs=(-1.0,) * len(written), finish_reason=reason
    )
    return AnsweredPrompt(
        prompt=Prompt(id=0, text=prompt), completion=completion, text=text, prompt_tokens=pieces(prompt), **more
    )


def states(text, prompt=QUESTION, *, vocabulary=CHATML, **options):
    return list(measure_health(answered(text, prompt, **options), vocabulary).states)


PROSE = (
    "Paris has been the seat of the French kings since the tenth century. The river Seine runs through it, and most of "
    "its bridges are older than the houses beside them. In 1889 a tower of iron was built for a fair, 300 metres high; "
    "it was to be taken down after twenty years, but radio needed a mast. Today seven million people go up each year."
)
CODE = """def area(shapes):
    total = 0.0
    for shape in shapes:
        if shape.kind == "circle":
            total += 3.14159 * shape.radius ** 2
        elif shape.kind == "square":
            total += shape.side ** 2
        else:
            raise ValueError(shape.kind)
    return total
"""
TABLE = "| name | age | town | year | sum |\n|------|-----|------|------|-----|\n" + "".join(
    f"| {name} | {20 + place} | {town} | {1990 + place} | {7 * place} |\n"
    for place, (name, town) in enumerate([("Ann", "Oslo"), ("Bo", "Rome"), ("Cy", "Lima"), ("Di", "Bonn")] * 2)
)
JAPANESE = "東京は日本の首都であり、世界で最も人口の多い都市の一つです。江戸時代から政治の中心でした。"
CHINESE = "北京是中华人民共和国的首都，也是全国的政治、文化和国际交往中心，历史悠久，名胜古迹众多。"
RUSSIAN = "Москва является столицей России и крупнейшим городом страны."


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        *((text, QUESTION) for text in ("Paris.", "4", "Yes", "\n Yes", "a a a a", "ha ha ha!", "0, 0, 0, 0, 0")),
        (PROSE, QUESTION),
        (CODE, QUESTION),
        (f"```python\n{CODE}```\n", QUESTION),
        (TABLE, QUESTION),
        (", ".join(map(str, range(1, 120))), QUESTION),
        ("\n".join(f"{number}. item" for number in range(1, 60)), QUESTION),
        ("[[1, 0, 0], [0, 1, 0], [0, 0, 1]]", QUESTION),
        (f"{PROSE}\n\n{'-' * 20}\n\n{PROSE[::-1]}", QUESTION),
        (JAPANESE, "日本の首都はどこですか？"),
        (CHINESE, "中国的首都是哪里？"),
        (RUSSIAN, "Какой город столица России?"),
        (f"<think>{PROSE}</think>Paris.", QUESTION),
    ],
)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.BUDGET])
def test_a_good_answer_has_no_state(text, prompt, reason):
    assert states(text, prompt, reason=reason) == []


def test_a_cut_answer_is_cut_and_no_other():
    assert states(PROSE, reason=FinishReason.LENGTH) == [State.CUT]
    assert states("", reason=FinishReason.BUDGET) == states("", reason=FinishReason.CANCELLED) == []


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("It is the town of " + "ba " * 60, 5),
        ("!" * 64, 0),
        (PROSE + " I do not know." * 8, len(pieces(PROSE))),
        (" the the" * 40, 0),
        (f"{PROSE} {JAPANESE * 4}", len(pieces(PROSE)) + 1),
    ],
)
def test_a_loop_has_the_token_with_which_it_begins(text, begin):
    health = measure_health(answered(text, reason=FinishReason.LENGTH), CHATML)
    assert State.LOOP in health.states and State.REPETITIVE not in health.states
    # What comes before may happen to be the end of a period.
    assert begin - 1 <= health.loop_from <= begin
    assert 0 < health.loop_share <= 1 and str(health) == " ".join(health.states)


def test_a_loop_counts_at_the_end_in_half_of_an_answer_or_where_it_is_long():
    rest = list(range(1000, 1400))

    def loops(tokens):
        return measure_health(answered("x", tokens=tokens), Vocabulary(ends=frozenset({END}))).loop_from

    assert loops([*rest, *[7] * LOOP_TOKENS]) == 400 and loops([*rest, *[7] * (LOOP_TOKENS - 1)]) is None
    assert loops([*rest[:40], *[7] * 40]) == loops([*rest[:20], *[7] * 40, *rest[20:40]]) + 20 == 40
    assert loops([*rest[:21], *[7] * 40, *rest[20:40]]) is None
    assert loops([*rest, *[7] * LOOP_LONG, *rest, *rest]) == 400
    assert loops([*rest, *[7] * (LOOP_LONG - 1), *rest, *rest]) is None
    share = measure_health(answered("x", tokens=[*rest, *[7] * 100, *rest]), CHATML)
    assert (share.states, share.loop_from, share.loop_share) == ((), None, 1 / 9)


def test_what_repeats_without_a_period_is_repetitive():
    rows = [f'{{"question": "What is {n * 7 % 60}?", "answer": "It is {n * 7 % 60}."}}' for n in range(80)]
    assert states("\n".join(rows)) == [State.REPETITIVE]
    assert states("\n".join(rows[:2])) == states(PROSE * 2) == []


@pytest.mark.parametrize("text", ["", " ", "\n\n\t", "\u3000", "<think>so</think>", "<think>\n\n</think>\n\n"])
def test_an_answer_of_nothing_is_empty(text):
    assert states(text) == [State.EMPTY]
    assert (State.EMPTY in states(text, reason=FinishReason.LENGTH)) == (not text.strip())


def test_a_call_of_a_tool_is_no_empty_answer():
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}'
    assert states(call, vocabulary=HARMONY) == []
    assert states("<|channel|>analysis<|message|>so", vocabulary=HARMONY) == [State.EMPTY]


def test_special_tokens_and_markers_of_turns():
    assert states("Paris", tokens=(7, SPECIAL, 8)) == [State.SPECIAL_TOKEN]
    assert states("Paris", tokens=(7, END, 8)) == [], "whose ends are ignored, as ignore_eos says"
    assert states("Paris.<|im_end|>\n<|im_start|>user\nAnd Spain?") == [State.SPECIAL_TOKEN]
    assert states("<|channel|>final<|message|>Paris", vocabulary=HARMONY) == []
    assert State.SPECIAL_TOKEN in states("<|channel|>final<|message|>Paris")


def test_markers_of_reasoning_without_a_partner():
    assert states("<think>so it is Paris") == [State.EMPTY, State.UNBALANCED_THINK]
    assert states("<think>so it is Paris", reason=FinishReason.LENGTH) == [State.CUT]
    assert states("so</think>Paris") == [State.UNBALANCED_THINK]
    assert states("so</think>Paris", prompt_end="<think>\n") == []
    assert states("so</thinking>Paris", prompt_end="<think>\n") == [State.EMPTY, State.UNBALANCED_THINK]
    # A stop string that is the closing marker leaves the opening one alone, and so does a cancelled answer.
    unfinished = answered("<think>so", reason=FinishReason.CANCELLED)
    assert measure_health(unfinished, CHATML).states == ()


def test_bytes_that_are_no_characters():
    assert states("Par\ufffdis") == states("Paris\ufffd") == [State.INVALID_UTF8]
    assert states("Paris\ufffd", reason=FinishReason.LENGTH) == [State.CUT], "a character that was cut"
    assert states("It is \ufffd.", "What is the sign \ufffd for?") == []


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (CHINESE, QUESTION),
        (CHINESE, "Who were the French kings, and what did the Chinese think of them?"),
        (RUSSIAN, QUESTION),
        ("서울은 대한민국의 수도이자 최대 도시입니다.", QUESTION),
        ("अगर आप चाहें तो यह नगर राजधानी है।", QUESTION),
        (f"The capital is Paris. {CHINESE}", QUESTION),
        (CHINESE, "日本の首都はどこですか？"),
        (JAPANESE, "Какой город столица России?"),
        (PROSE, "Какой город столица Франции?"),
        (PROSE, "法国的首都是哪里？"),
    ],
)
def test_an_answer_in_a_script_that_its_prompt_does_not_have(text, prompt):
    assert states(text, prompt) == [State.OTHER_SCRIPT]


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (RUSSIAN, "Translate into Russian: Moscow is the capital."),
        (CHINESE, "How do you say this in Chinese?"),
        (CHINESE, "What is the Chinese word for a capital?"),
        (CHINESE, "首都を中国語で説明してください。"),
        (PROSE, "Расскажи о Париже на английском."),
        (PROSE, "把这句话翻译成英语"),
        ("The letters α, β and γ stand for angles, and π is 3.14.", QUESTION),
        ("Токио (東京) — столица Японии, большой город.", "Какой город столица Японии?"),
        (f"```python\n{CODE}```", "写一个计算面积的函数"),
        (r"$$\frac{\alpha + \beta + \gamma + \delta}{\sqrt{\epsilon + \zeta}} = \operatorname{area}$$", "面积是多少？"),
        ("YouTube, Google", "世界上最大的两个网站是什么？"),
        ("x = 四", "2 + 2 ="),
        (CHINESE, "1 + 1 ="),
    ],
)
def test_another_script_that_is_asked_for_or_is_no_language_is_none(text, prompt):
    assert State.OTHER_SCRIPT not in states(text, prompt)


PASSAGE = f"Read this and name the year of the tower. {PROSE}"


def test_an_answer_that_is_its_prompt():
    assert states(QUESTION) == states(f"\n{QUESTION} ") == [State.PROMPT_COPY]
    assert states(PASSAGE, PASSAGE) == states(PROSE, PASSAGE) == [State.PROMPT_COPY]
    chat = Prompt(id=0, messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}))
    copied = answered(QUESTION)
    copied = AnsweredPrompt(prompt=chat, completion=copied.completion, text=QUESTION)
    assert measure_health(copied, CHATML).states == (State.PROMPT_COPY,)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("In 1889 a tower of iron was built", PASSAGE),
        ("1889", PASSAGE),
        ("yes", "yes"),
        (f"The tower is of 1889: {PROSE[180:240]} That is what the text says of it, and no more.", PASSAGE),
        (f"{QUESTION} It is Paris.", QUESTION),
    ],
)
def test_an_answer_with_words_of_its_prompt_is_no_copy(text, prompt):
    assert states(text, prompt) == []


def test_distinct_ngrams_are_those_of_the_papers():
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 5]  # 1234 2341 3412 4123 1234 2345
    assert distinct_ngrams(tokens) == 5 / 6
    assert [distinct_ngrams(tokens[:size]) for size in range(5)] == [1.0] * 5
    assert distinct_ngrams([0] * 13) == 1 / 10


def test_compression_is_a_share_of_the_bytes():
    assert compressed_share("") == compressed_share("a") == 1.0
    assert compressed_share("ba" * 5000) < 0.01 < 0.4 < compressed_share(PROSE) < 1
    assert compressed_share("\ud800") == 1.0


def test_the_vocabulary_of_a_tokenizer_has_its_special_tokens_but_no_ends():
    tokenizer = tiny.tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert tokenizer.eos_token_id in vocabulary.ends and tokenizer.bos_token_id in vocabulary.special
    assert not vocabulary.ends & vocabulary.special
    assert not vocabulary.special & set(tokenizer.encode("a text", add_special_tokens=False))


texts = st.text(max_size=200) | st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<|channel|>", "<|message|>", "final", "ba ", "\ufffd", "[INST]", "東京", " "]
    ),
    max_size=40,
).map("".join)


@given(
    text=texts,
    prompt=texts.filter(str.strip),
    tokens=st.lists(st.integers(0, 5), max_size=80),
    prompt_end=texts,
    reason=st.sampled_from(list(FinishReason)),
    vocabulary=st.sampled_from([CHATML, HARMONY, Vocabulary()]),
)
def test_whatever_an_answer_is_its_health_is_measured_and_the_same_again(
    text, prompt, tokens, prompt_end, reason, vocabulary
):
    answer = answered(text, prompt, tokens=tokens, reason=reason, prompt_end=prompt_end)
    health = measure_health(answer, vocabulary)
    assert health == measure_health(answer, vocabulary) and isinstance(health, Health)
    assert list(health.states) == [state for state in State if state in health.states]
    assert (health.loop_from is not None) == (State.LOOP in health.states)
    assert all(0 <= value <= 1 for value in (health.loop_share, health.distinct, health.compression))
    assert not {State.LOOP, State.REPETITIVE} <= set(health.states)


REFUSAL = "I am sorry, but I can not help you with that request today."


def states_of(*answers):
    return [list(health.states) for health in measure_round(answers, CHATML).answers]


def test_the_same_answer_to_different_prompts():
    assert states_of(answered(REFUSAL, "a"), answered(f" {REFUSAL}\n", "b"), answered("Paris.", "c")) == [
        [State.SAME_ANSWER],
        [State.SAME_ANSWER],
        [],
    ]


def test_answers_to_one_prompt_and_short_ones_may_be_the_same():
    assert states_of(answered(REFUSAL, "a"), answered(REFUSAL, "a")) == [[], []]
    assert states_of(answered("Yes", "a"), answered("Yes", "b"), answered("", "c"), answered("", "d")) == [
        [],
        [],
        [State.EMPTY],
        [State.EMPTY],
    ]


def test_shares_have_every_state_and_how_many_answers_there_are():
    round_ = measure_round([answered(""), answered("Paris."), answered("x" + " ha" * 50), answered("Rome.")], CHATML)
    assert list(round_.shares) == [state.value for state in State]
    assert round_.shares["loop"] == Share(count=1, total=4) and round_.shares["empty"].value == 0.25
    assert round_.scalars() == {f"health/{state}": 0.25 * (state in ("loop", "empty")) for state in State}
    assert measure_round([], CHATML).scalars() == {} and Share(count=0, total=0).value == 0.0
