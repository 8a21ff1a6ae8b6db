"""A tokenizer that differs from its file is refused."""

import pytest
import tokenizers
import transformers
from tokenizers import pre_tokenizers

from lockstep.errors import ConfigError
from lockstep.text.probes import check_against_file, probes
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
