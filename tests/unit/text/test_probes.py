"""A tokenizer that differs from its file is refused."""

from typing import ClassVar

import pytest
import tokenizers
import transformers
from tokenizers import pre_tokenizers

from lockstep.errors import ConfigError
from lockstep.text import load_tokenizer
from lockstep.text.probes import check_against_file, check_against_model, probes
from tests import made_tokenizers


def test_probes_are_some_hundred_different_texts():
    texts = probes(["<s>", "</s>"])
    assert 200 < len(texts) < 1000 and len(set(texts)) > 0.9 * len(texts)
    assert any("<s>" in text for text in texts) and {"4", "😀", "é", "ب", "我"} <= set("".join(texts))


@pytest.mark.parametrize("part", ["pre_tokenizer", "decoder", "post_processor"])
def test_a_difference_from_the_file_is_an_error_that_names_it(part, tmp_path):
    place = made_tokenizers.write(tmp_path / "made", made_tokenizers.byte_level("</s>", begin="<s>"), {})
    file = str(place / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(file)
    check_against_file(transformers.PreTrainedTokenizerFast(tokenizer_object=made), file)
    if part == "pre_tokenizer":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif part == "decoder":
        made.decoder = tokenizers.decoders.Fuse()
    else:
        made.post_processor = tokenizers.processors.ByteLevel()
    what = "text" if part == "decoder" else "ids"
    with pytest.raises(ConfigError, match=rf"{file}: .* probes have other {what}, first .* in the place of"):
        check_against_file(transformers.PreTrainedTokenizerFast(tokenizer_object=made), file)


def test_a_vocabulary_of_sentencepiece_that_transformers_reads_otherwise_is_refused(tmp_path):
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    texts = [f"What is {number} plus {number * 3}? The answer is {number * 4}." for number in range(99)]
    with (tmp_path / "tokenizer.model").open("wb") as file:
        trainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=340, model_type="bpe", byte_fallback=True,
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(
        ConfigError, match=r"tokenizer\.model: transformers reads it otherwise .*the tokenizer\.json of this model"
    ):
        load_tokenizer(tmp_path)


def test_a_vocabulary_of_sentencepiece_that_is_read_as_it_says_is_taken(tmp_path):
    class Same:
        added_tokens_decoder: ClassVar[dict[int, str]] = {}

        def __call__(self, texts, **options):
            return {"input_ids": own.encode(texts)}

    sentencepiece = pytest.importorskip("sentencepiece")
    file = tmp_path / "tokenizer.model"
    with file.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c"] * 9), model_writer=stream, vocab_size=9, hard_vocab_limit=False,
            minloglevel=2,
        )  # fmt: skip
    own = sentencepiece.SentencePieceProcessor(model_file=str(file))
    check_against_model(Same(), str(file))
    file.write_text("YQ== 0\n")  # as tiktoken has it
    check_against_model(Same(), str(file))
