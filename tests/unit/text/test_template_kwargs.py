"""Variables of a chat template: as transformers passes them, in every chat of a run, and in what a run is known by."""

import json

import pytest

from lockstep.errors import ConfigError
from lockstep.main.arguments import parse_arguments
from lockstep.text import Prompt, encode, load_tokenizer, tokenizer_digest
from lockstep.text.tokenize import chat_text
from lockstep.training import TrainLmConfig
from lockstep.training.data import LmDataConfig
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and enable_thinking is defined and not "
    "enable_thinking %}<none>{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}{% endif %}"
)
QUESTION = [{"role": "user", "content": "two plus two?"}]
ANSWERED = [*QUESTION, {"role": "assistant", "content": "four"}]


@pytest.fixture
def place(tmp_path):
    """A tokenizer with a template that can be told not to think."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_prompts_have_the_text_that_transformers_makes(place, kwargs):
    tokenizer = load_tokenizer(place, chat_template_kwargs=kwargs)
    for chat, opened in ((QUESTION, True), (ANSWERED, False)):
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened, **kwargs)
        assert chat_text(tokenizer, chat, add_generation_prompt=opened) == expected
        assert ("<none>" in expected) == (kwargs == {"enable_thinking": False})
    expected = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False, **kwargs)
    tokens = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert encode(tokenizer, [Prompt(id=0, messages=tuple(QUESTION))]) == [tuple(tokens)]


def test_training_data_has_them_and_another_cache(place, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": ANSWERED}) + "\n")
    config = LmDataConfig(train_urls=(str(tmp_path / "x.jsonl"),), format="chat", cache_dir=str(tmp_path / "cache"))
    rows = {}
    for thinks in (True, False):
        tokenizer = load_tokenizer(place, chat_template_kwargs={"enable_thinking": thinks})
        (cache,) = config.load(tokenizer, 128, 0).caches
        ((sequence,),) = cache.rows([0])
        rows[thinks] = tokenizer.decode(sequence.tokens), tokenizer.decode(sequence.tokens[sequence.n_prompt :])
    assert "<none>four" in rows[False][0] and "<none>" not in rows[True][0]
    assert "<none>" not in rows[False][1], "what the template opens an answer with is the prompt's"
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2
    digests = {
        tokenizer_digest(load_tokenizer(place, chat_template_kwargs=each)) for each in ({}, {"enable_thinking": 1})
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"enable_thinkng": False}, "has enable_thinkng, which the chat template of tokenizer .* does not mention"),
        ({"messages": []}, "has messages, which every chat has a value of its own for"),
        ({"eos_token": "x"}, "has eos_token, which every chat has a value of its own for"),
    ],
)
def test_names_that_cannot_work(place, kwargs, text):
    with pytest.raises(ConfigError, match=text):
        load_tokenizer(place, chat_template_kwargs=kwargs)


def test_a_run_reads_its_tokenizer_with_them(place):
    arguments = ["--config_path", "config/demo.yaml", "--tokenizer", place]
    config = parse_arguments(TrainLmConfig, [*arguments, "--chat_template_kwargs", "{enable_thinking: false}"])
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert chat_text(config.read_tokenizer(), QUESTION, add_generation_prompt=True).endswith("<none>")
