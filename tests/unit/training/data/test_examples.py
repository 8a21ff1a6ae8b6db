"""Where an answer begins in the tokens of a chat."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lockstep.errors import ConfigError
from lockstep.training import LmDataConfig, PreferenceDataConfig
from lockstep.training.data.examples import check_format, tokenize
from lockstep.training.data.records import BadRow
from tests.unit.training.data import characters

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def merging():
    """Characters as tokens, but two newlines, or a newline and an "ä", are one token."""
    text = "abcdefghijklmnopqrstuvwxyz<>\nä?"
    vocab = {character: number for number, character in enumerate(text)}
    vocab |= {"\n\n": len(text), "\nä": len(text) + 1}
    model = models.BPE(vocab, [("\n", "\n"), ("\n", "ä")])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), chat_template=TEMPLATE)


def chat(answer):
    return [{"role": "user", "content": "q?"}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("answer", "first", "rest"),
    [("ok", "o", "k"), ("\nok", "\n\n", "ok"), ("äk", "\nä", "k")],
    ids=["apart", "newline", "letter"],
)
def test_the_first_token_of_the_answer_is_the_one_with_its_first_character(answer, first, rest):
    tokenizer = merging()
    (((sequence),),) = tokenize(tokenizer, "chat", [{"messages": chat(answer)}])
    tokens = tokenizer.convert_ids_to_tokens(sequence.tokens)
    assert tokens[sequence.n_prompt] == first
    assert tokens[sequence.n_prompt + 1 :] == list(rest)
    assert "".join(tokens) == "<user>\nq?<assistant>\n" + answer


def test_pairs_find_the_boundary_of_each_side(tmp_path):
    records = [{"chosen": chat("\nok"), "rejected": chat("no")}]
    config = PreferenceDataConfig(train_urls=characters.write(tmp_path / "x.jsonl", records))
    found = characters.columns(config.load(merging(), 32, 0))
    assert found["loss_mask"].sum(-1).tolist() == [[3, 2]]  # the newlines, o, k; n, o


class Slow(characters.Tokenizer):
    """Merges a newline with the one after it, and does not say which characters a token holds."""

    def encode(self, text, add_special_tokens=True):
        return [ord(one) for one in text.replace("\n\n", "\x04")]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        turns = "".join(f"<{m['role']}>\n{m['content']}" for m in messages)
        return turns + ("<assistant>\n" if add_generation_prompt else "")


def test_a_slow_tokenizer_works_until_a_token_is_merged():
    good, merged = tokenize(Slow(), "chat", [{"messages": chat("ok")}, {"messages": chat("\nok")}])
    assert good[0].n_prompt == len("<user>\nq?<assistant>\n")
    assert isinstance(merged, BadRow) and "Use its fast version" in str(merged)


def test_a_template_that_changes_the_prompt_is_a_bad_row():
    class Thinks(characters.Tokenizer):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
            return super().apply_chat_template(messages, tokenize) + ("|think" if add_generation_prompt else "")

    (found,) = tokenize(Thinks(), "chat", [{"messages": chat("ok")}])
    assert "does not begin with that of its prompt" in str(found)


def test_chats_need_a_template(tmp_path):
    class Plain(characters.Tokenizer):
        chat_template = None

    with pytest.raises(ConfigError, match="'characters' has no chat template"):
        LmDataConfig(train_urls=("x.jsonl",), format="chat").load(Plain(), 16, 0)
    check_format(Plain(), "prompt_completion")
