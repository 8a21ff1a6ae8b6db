"""JSON of others: one error of ours for whatever is wrong with it."""

import pytest

from lockstep.errors import ConfigError, PromptError
from lockstep.json_text import parse_json


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "the file is not JSON: .*. Mend it."),
        (b"\xff", "the file is not UTF-8: .*. Mend it."),
        ("[" * 100_000, "the file is JSON that is nested too deeply to be read. Mend it."),
        ("1" * 5000, "the file is not JSON: .*digits.*. Mend it."),
        ("[]", "the file is a JSON list, not an object. Mend it."),
        ("null", "the file is a JSON NoneType, not an object. Mend it."),
    ],
)
def test_what_is_wrong_is_one_error_with_the_place(text, why):
    with pytest.raises(PromptError, match=why):
        parse_json(text, "the file", dict, "Mend it.", PromptError)
    with pytest.raises(ConfigError):
        parse_json(text, "the file", dict, "Mend it.")


def test_what_is_right_is_returned():
    assert parse_json(b'{"a": [1]}', "the file", dict, "Mend it.") == {"a": [1]}
    assert parse_json("3", "the file", object, "Mend it.") == 3
