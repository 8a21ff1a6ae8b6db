import pytest

from lockstep.errors import PromptError
from lockstep.text import following_tokens
from tests import tiny

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ASKED = [{"role": "user", "content": "What is 12 plus 7?"}]
REPLY = [{"role": "tool", "content": "19"}]


@pytest.fixture
def tokenizer():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def test_tokens_go_from_the_end_of_an_answer_to_the_next_one(tokenizer):
    tokens = following_tokens(tokenizer, ASKED, (1, 2), REPLY)
    expected = "<|im_end|>\n<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\n"
    assert list(tokens) == tokenizer.encode(expected, add_special_tokens=False)


def test_the_end_of_a_turn_that_was_sampled_comes_once(tokenizer):
    tokens = following_tokens(tokenizer, ASKED, (1, 2), REPLY)
    assert following_tokens(tokenizer, ASKED, (1, tokens[0]), REPLY) == tokens[1:]


def test_after_a_text_contents_follow_as_they_are(tokenizer):
    assert list(following_tokens(tokenizer, [], (1, 2), REPLY)) == tokenizer.encode("19", add_special_tokens=False)


HARMONY = (
    "{% set last = namespace(name=none) %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{% if last.name is none %}{{ raise_exception('a tool without a call') }}{% endif %}"
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|message|>' + m['content'] + '<|end|>' }}"
    "{% elif m['tool_calls'] %}{% set last.name = m['tool_calls'][0]['function']['name'] %}"
    "{{ '<|start|>assistant to=functions.' + last.name + '<|message|>' }}"
    "{{ m['tool_calls'][0]['function']['arguments'] | tojson }}{{ '<|call|>' }}"
    "{% elif '<|message|>' in m['content'] %}{{ raise_exception('a marker in the content') }}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""A template that refuses what gpt-oss's does: markers in an answer, and a tool's result that follows no call."""


def test_a_template_that_wants_a_call_before_a_result_is_given_one(tokenizer):
    tokenizer.chat_template = HARMONY
    called = {"role": "assistant", "content": "<|channel|>commentary to=functions.add<|message|>{}"}
    before = [*ASKED, called, {"role": "tool", "name": "add", "content": "19"}]
    for after, speaker, end in (
        ({"role": "tool", "name": "sub", "content": "5"}, "functions.sub to=assistant", "<|call|>"),
        ({"role": "tool", "content": "5"}, "functions.tool to=assistant", "<|call|>"),
        ({"role": "user", "content": "5"}, "user", "<|end|>"),
    ):
        for said in (ASKED, before):
            tokens = following_tokens(tokenizer, said, (1, 2), [after])
            expected = f"{end}<|start|>{speaker}<|message|>5<|end|><|start|>assistant"
            assert list(tokens) == tokenizer.encode(expected, add_special_tokens=False)


def test_a_template_that_hides_answers_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(PromptError, match="does not write an assistant's message as it is"):
        following_tokens(tokenizer, ASKED, (1, 2), REPLY)
