"""The end of an answer: what tokenizer and files say, in transformers' order."""

import json
import logging

import pytest
import transformers

from lockstep.errors import ConfigError
from lockstep.text import StopFinder, endings, load_tokenizer, stop_ids, write_tokenizer
from tests import made_tokenizers, tiny


@pytest.fixture
def place(tmp_path):
    return made_tokenizers.write(
        tmp_path / "made", made_tokenizers.byte_level("<eos>", "<turn>"), {"eos_token": "<eos>"}
    )


CASES = {
    "configuration": ({"config": {"eos_token_id": 5}}, {0, 5}),
    "configuration, a list": ({"config": {"eos_token_id": [5, 6]}}, {0, 5, 6}),
    "configuration of the text part": ({"config": {"text_config": {"eos_token_id": 5}}}, {0, 5}),
    "generation configuration first": (
        {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": 1}},
        {0, 1},
    ),
    "generation configuration without": ({"config": {"eos_token_id": 5}, "generation_config": {"top_k": 1}}, {0, 5}),
    "generation configuration null": (
        {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": None}},
        {0, 5},
    ),
    "none": ({"config": {}}, {0}),
}


@pytest.mark.parametrize("name", CASES)
def test_files_of_a_checkpoint_say_where_an_answer_ends(name, place):
    files, expected = CASES[name]
    for file, values in files.items():
        (place / f"{file}.json").write_text(json.dumps(values))
    assert set(stop_ids(load_tokenizer(place))) == expected
    assert set(stop_ids(transformers.AutoTokenizer.from_pretrained(place))) == expected, "of one that users load"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_beyond_the_vocabulary_names_its_file_and_is_left_out(file, place, caplog):
    (place / file).write_text(json.dumps({"eos_token_id": [1, 4000]}))
    with caplog.at_level(logging.INFO):
        assert stop_ids(load_tokenizer(place)) == (0, 1)
    assert f"{place}/{file} has eos_token_id 4000, and the tokenizer has the ids 0 to 317" in caplog.text
    assert f"an answer ends with 0 '<eos>' (the tokenizer), 1 '<turn>' ({place}/{file})" in caplog.text


@pytest.mark.parametrize("wrong", ['"x"', "[1.5]", "{}", "-1", "true"])
def test_what_is_no_id_is_refused_with_file_and_key(wrong, place):
    (place / "config.json").write_text(f'{{"eos_token_id": {wrong}}}')
    with pytest.raises(ConfigError, match=r"config\.json has eos_token_id .*, which is no token id\. Mend it"):
        load_tokenizer(place)


@pytest.mark.parametrize("stated", ["Question:", ["Question:"]])
def test_stop_strings_of_a_checkpoint_are_not_passed_over(stated, place, tmp_path):
    (place / "generation_config.json").write_text(json.dumps({"stop_strings": stated, "eos_token_id": 1}))
    for tokenizer in (load_tokenizer(place), transformers.AutoTokenizer.from_pretrained(place)):
        find_stop = StopFinder(tokenizer)
        with pytest.raises(
            ConfigError, match=r"made/generation_config\.json has stop_strings \['Question:'\], and stop"
        ):
            find_stop.check([])
        find_stop.check(["Answer:"])
        write_tokenizer(tokenizer, tmp_path / "out")
        with pytest.raises(
            ConfigError, match=r"out/generation_config\.json has stop_strings \['Question:'\], and stop"
        ):
            StopFinder(load_tokenizer(tmp_path / "out")).check([])
    (place / "generation_config.json").write_text(json.dumps({"stop_strings": [5]}))
    with pytest.raises(ConfigError, match="generation_config.json has stop_strings 5, which is no text"):
        load_tokenizer(place)


def test_a_tokenizer_with_nothing_that_ends_an_answer_is_warned_of(caplog):
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    endings._log_stops.cache_clear()
    assert stop_ids(tokenizer) == ()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("an answer ends with no token: ") and "each is as long as max_new_tokens" in line
