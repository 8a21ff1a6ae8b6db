"""A prompt that a model cannot take names itself, its place, and the limit that it breaks."""

import dataclasses
import logging

import pytest

from lockstep.errors import ConfigError, PromptError
from lockstep.text import ModelLimits, check_vocab, encode, load_tokenizer, read_prompts
from tests import made_tokenizers

ROWS = 318  # all of the tokenizer but the tokens that `soft_tokens` adds


def soft_tokens(place, *texts, **files):
    """A tokenizer with tokens beyond an embedding of `ROWS` rows, as Gemma 3 1B's ``<image_soft_token>``."""
    made = made_tokenizers.byte_level("<eos>", "<turn>")
    made.add_special_tokens(list(texts))
    return load_tokenizer(made_tokenizers.write(place, made, {"eos_token": "<eos>"}, **files))


LENGTHS = {  # max_seq_len, that of the model, what the message says from the limit on
    "of the user": (
        16,
        64,
        r"max_seq_len is 16\. Shorten the prompt to 12 tokens, or raise max_seq_len to at least 2\d",
    ),
    "of the model": (None, 16, r"the model allows 16\. Shorten the prompt to 12 tokens\.$"),
    "of the user beyond the model": (32, 16, r"the model allows 16\. Shorten the prompt to 12 tokens\.$"),
    "of the user, and the model allows no more": (16, 17, r"max_seq_len is 16\. Shorten the prompt to 12 tokens\.$"),
    "no room": (4, 64, r"max_seq_len is 4\. Raise max_seq_len to at least 2\d\.$"),
    "no room in the model": (None, 4, r"the model allows 4\. Shorten the prompt and lower max_new_tokens\.$"),
    "room for a shorter answer": (
        None,
        24,
        r"the model allows 24\. Shorten .* 20 tokens, or lower max_new_tokens to 1\.$",
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_prompt_that_is_too_long_names_its_line_and_no_limit_that_nobody_set(name, tmp_path):
    longest, of_model, text = LENGTHS[name]
    tokenizer = soft_tokens(tmp_path / "made")
    (tmp_path / "asked.txt").write_text("short\n\n" + "Paris " * 20 + "x\n")
    limits = ModelLimits(rows=ROWS, max_seq_len=of_model)
    place = rf"prompt 1 \({tmp_path}/asked\.txt:3\) has 23 tokens and max_new_tokens is 4: together 27, but "
    with pytest.raises(PromptError, match=place + text):
        prompts = read_prompts(str(tmp_path / "asked.txt"))
        encode(tokenizer, prompts[1:], max_seq_len=longest, max_new_tokens=4, limits=limits)


def test_a_token_beyond_the_embedding_is_refused_only_where_it_occurs(tmp_path, caplog):
    tokenizer = soft_tokens(tmp_path / "made", "<image>")
    (tmp_path / "asked.txt").write_text("Paris\nWhat is <image> here?\n")
    limits = ModelLimits(rows=ROWS, max_seq_len=64)
    prompts = read_prompts(str(tmp_path / "asked.txt"))
    assert len(encode(tokenizer, prompts[:1], limits=limits)) == 1
    text = (
        rf"prompt 1 \({tmp_path}/asked\.txt:2\) has the token '<image>' \(id {ROWS}\), .* has the ids 0 to {ROWS - 1}\."
    )
    with pytest.raises(PromptError, match=text):
        encode(tokenizer, prompts, limits=limits)
    with pytest.raises(PromptError, match="prompt 0 has the token '<image>'"):
        encode(tokenizer, read_prompts([{"prompt": "<image>"}]), limits=limits)
    assert len(encode(tokenizer, prompts, limits=dataclasses.replace(limits, rows=ROWS + 1))) == 2


def test_tokens_beyond_the_embedding_are_warned_of_once_and_those_of_the_vocabulary_refused(tmp_path, caplog):
    tokenizer = soft_tokens(tmp_path / "made", *(f"<image {number}>" for number in range(4)))
    for _ in range(2):
        check_vocab(tokenizer, ROWS)
    (warning,) = caplog.messages
    assert warning.startswith(f"4 added tokens of the tokenizer are beyond the {ROWS} rows of the model's embedding: ")
    assert warning.endswith(
        f"'<image 0>' ({ROWS}), '<image 1>' ({ROWS + 1}), '<image 2>' ({ROWS + 2}), …. A prompt or an example that has "
        "one is refused."
    )
    check_vocab(tokenizer, ROWS + 4)
    assert len(caplog.messages) == 1
    with pytest.raises(ConfigError, match=rf"largest token id is {ROWS - 1} .* has {ROWS - 1} entries"):
        check_vocab(tokenizer, ROWS - 1)


def test_an_end_beyond_the_embedding_is_warned_of_with_its_file(tmp_path, caplog):
    ending = {"eos_token_id": [0, ROWS]}
    with caplog.at_level(logging.WARNING):
        check_vocab(soft_tokens(tmp_path / "made", "<over>", generation_config=ending), ROWS)
    file = tmp_path / "made" / "generation_config.json"
    assert f"is refused; '<over>' ends an answer as {file} says, and the model can never write it." in caplog.text
