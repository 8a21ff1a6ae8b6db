"""Which questions a rollout has, and questions that cannot be used."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lockstep.errors import ConfigError
from lockstep.text import Prompt
from lockstep.training.data import GrpoDataConfig
from lockstep.training.rl import Questions, load_questions
from lockstep.training.rl import questions as grpo_questions
from tests import tiny


def write(tmp_path, *questions):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"question": each, "answer": "#### 1"}) + "\n" for each in questions))
    return str(path)


def load(path, row_length=32, **values):
    config = GrpoDataConfig(train_urls=(path,), **values)
    return load_questions(config, tiny.tokenizer(), row_length=row_length, max_new_tokens=8, seed=0)


def made_up(count=10, **values):
    prompts = [Prompt(id=i, text=f"q{i}", answer="1") for i in range(count)]
    tokens = [(1,) * (1 + i % 3) for i in range(count)]
    return Questions(prompts=prompts, tokens=tokens, seed=7, row_length=64, **values)


def test_every_question_comes_once_per_epoch_in_an_order_of_its_own():
    questions = made_up()
    drawn = np.concatenate([questions.drawn(rollout, 4) for rollout in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()
    np.testing.assert_array_equal(made_up().drawn(3, 4), drawn[12:16])
    assert made_up(shuffle=False).drawn(2, 4).tolist() == [8, 9, 0, 1]


def test_further_attempts_draw_others():
    questions = made_up(100)
    again = questions.drawn(3, 8, attempt=1)
    assert len(set(again)) == 8 and again.tolist() != questions.drawn(3, 8).tolist()
    np.testing.assert_array_equal(again, made_up(100).drawn(3, 8, attempt=1))
    assert again.tolist() != questions.drawn(3, 8, attempt=2).tolist() != questions.drawn(4, 8, attempt=1).tolist()


def test_no_question_comes_again_within_a_rollout():
    questions = made_up(20)
    for rollout in (0, 1, 7):
        drawn = np.concatenate([questions.drawn(rollout, 6, attempt) for attempt in range(3)])
        assert len(set(drawn.tolist())) == 18
    following = [questions.drawn(rollout, 5).tolist() for rollout in (1, 2, 3)]
    assert questions.drawn(0, 5, attempt=1).tolist() not in following, "what the next rollouts have anyway"


def test_what_decides_the_order_is_in_the_digest(monkeypatch):
    """Version 1 is this order; one that is changed has another version."""
    assert made_up().drawn(0, 10).tolist() == [8, 0, 7, 1, 3, 6, 2, 4, 5, 9]
    assert made_up().drawn(1, 4, attempt=1).tolist() == [7, 1, 0, 9]
    first = made_up().digest()
    assert first.endswith(" (version 1 of the order)")
    monkeypatch.setattr(grpo_questions, "ORDER_VERSION", 2)
    second = made_up().digest()
    monkeypatch.setattr(grpo_questions, "_permutation", lambda *_: np.arange(10))
    assert len({first, second, made_up().digest(), made_up(shuffle=False).digest()}) == 4


def test_the_longest_are_repeated_where_there_are_too_few():
    assert made_up(3).longest(2) == [2, 1]
    assert made_up(3).longest(5) == [2, 1, 0, 2, 1]


def test_a_question_is_a_chat_or_a_text(tmp_path):
    path = write(tmp_path, "What is 1 plus 1?")
    chat = load(path, system_prompt="Be brief.", instruction=" End with ####.", row_length=128)
    assert chat.prompts[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 plus 1? End with ####."},
    )
    text = load(path, format="text")
    assert text.prompts[0].text == "What is 1 plus 1?" and text.prompts[0].answer == "#### 1"
    assert text.tokens[0] == tuple(tiny.tokenizer().encode("What is 1 plus 1?"))
    assert chat.digest() != text.digest() == load(path, format="text").digest()


def test_a_prompt_that_leaves_no_room_is_named(tmp_path):
    path = write(tmp_path, "What is 1 plus 1?", "What is 1 plus 1 " * 8)
    with pytest.raises(ConfigError, match=r"q\.jsonl:2: the prompt has \d+ tokens .* or set data\.truncate: true"):
        load(path, format="text")
    assert len(load(path, format="text", truncate=True)) == 1
    with pytest.raises(ConfigError, match="0 questions that fit.*Check data.train_urls, and raise data.max_seq_len"):
        load(path, format="text", truncate=True, row_length=9)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    config = GrpoDataConfig(train_urls=(write(tmp_path, "What?"),))
    with pytest.raises(ConfigError, match=r"q\.jsonl:1: .* has no chat template"):
        load_questions(config, tokenizer, row_length=32, max_new_tokens=8, seed=0)


def test_a_system_prompt_needs_a_chat():
    with pytest.raises(ConfigError, match=r"data\.system_prompt is given and data\.format is text"):
        GrpoDataConfig(format="text", system_prompt="x")


def test_an_empty_question_is_a_bad_record(tmp_path):
    path = write(tmp_path, "What?", " ")
    with pytest.raises(ConfigError, match=r"q\.jsonl:2 has a prompt that cannot be used: is empty"):
        load(path, format="text")
    assert len(load(path, format="text", on_bad_row="skip")) == 1


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"question": 3, "answer": "x"}, r"needs the field 'question' .*\(data\.question_field\), and it is 3 "),
        ({"question": "x", "answer": {"a": 1}}, r"needs the field 'answer' .*, and it is \{'a': 1\} "),
    ],
)
def test_a_field_that_is_no_text_is_named_with_its_value(tmp_path, record, text):
    (tmp_path / "q.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=text):
        load(str(tmp_path / "q.jsonl"))


def test_a_function_of_a_users_own_makes_the_prompt(tmp_path, monkeypatch):
    (tmp_path / "own_questions.py").write_text(
        "from lockstep.text import Prompt\n"
        "def ask(record):\n"
        "    spec = record['extra']\n"
        "    return Prompt(id=0, text=spec['q'], answer=spec.get('a', ''), fields={'tests': spec['tests']})\n"
        "def wrong(record):\n"
        "    return record['extra']['q']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "q.jsonl"
    good = [json.dumps({"extra": {"q": f"{n}?", "tests": [n]}}) for n in range(2)]
    path.write_text("\n".join([*good, '{"other": 1}']) + "\n")
    with pytest.raises(ConfigError, match=r"q\.jsonl:3 .*: KeyError: 'extra' \(own_questions\.py, line \d"):
        load(str(path), format="own_questions:ask")
    questions = load(str(path), format="own_questions:ask", on_bad_row="skip")
    assert [(each.id, each.text, each.answer, each.fields) for each in questions.prompts] == [
        (n, f"{n}?", "", {"tests": [n]}) for n in range(2)
    ]
    with pytest.raises(ConfigError, match="the function returned '0\\?'; it must be a lockstep.text.Prompt"):
        load(str(path), format="own_questions:wrong")
    with pytest.raises(ConfigError, match="data.instruction is 'x', which has no effect with data.format"):
        load(str(path), format="own_questions:ask", instruction="x")
    with pytest.raises(ConfigError, match="must be chat, text, or module:name"):
        load(str(path), format="preference")


def test_a_question_as_messages_and_an_answer_that_is_a_number(tmp_path):
    path = tmp_path / "q.jsonl"
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "2 + 2"}]}]
    path.write_text(json.dumps({"question": messages, "answer": 4}) + "\n")
    (prompt,) = load(str(path), instruction=" Go.").prompts
    assert prompt.answer == "4"
    assert prompt.messages == (messages[0], {"role": "user", "content": "2 + 2 Go."})


@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz", "jsonl.zst"])
def test_questions_of_files_as_training_data_has_them_are_chats_of_several_turns(suffix, tmp_path):
    turns = [("user", "2 + 2"), ("assistant", "4"), ("user", "and 1 more")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [{"question": messages, "answer": 5, "level": "easy"}] * 3
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / f"q.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(lines) if suffix == "jsonl.gz" else zstandard.compress(lines))
    questions = load(str(path), row_length=64)
    assert [prompt.messages for prompt in questions.prompts] == [tuple(messages)] * 3
    assert [(prompt.answer, prompt.fields) for prompt in questions.prompts] == [("5", {"level": "easy"})] * 3
    shown = tiny.tokenizer().decode(questions.tokens[0])
    places = [shown.find(content) for _, content in turns]
    assert -1 < places[0] < places[1] < places[2]


def test_fields_have_names_of_the_user_s_and_all_others_reach_rewards(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"ask": "2 + 2", "gold": "4", "tests": ["assert f() == 4"]}\n')
    questions = load(str(path), question_field="ask", answer_field="gold")
    (prompt,) = questions.prompts
    assert (prompt.answer, prompt.fields) == ("4", {"tests": ["assert f() == 4"]})
    path.write_text('{"ask": "2 + 2", "gold": "4", "tests": ["assert f() == 5"]}\n')
    assert load(str(path), question_field="ask", answer_field="gold").digest() != questions.digest()
    with pytest.raises(ConfigError, match=r"field 'question' with a text \(data.question_field\), and has \['ask'"):
        load(str(path))


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ([{"question": "1 + 2"}], "question 0 of the environment is {'question': '1 . 2'}; it must be a lockstep.text"),
        ([], r"the environment has 0 questions that fit; at least 1 is needed. Check its questions\(\)"),
    ],
)
def test_questions_of_an_environment_that_are_none_are_named(own, text):
    with pytest.raises(ConfigError, match=text):
        load_questions(GrpoDataConfig(), tiny.tokenizer(), row_length=32, max_new_tokens=4, seed=0, own=own)
