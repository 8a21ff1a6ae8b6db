"""JSON of others: one error of ours for whatever is wrong with it."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from lockstep.errors import ConfigError, HostError, PromptError
from lockstep.json_text import from_peer, parse_json, refused, typed
from lockstep.types import Drafts, Request, SamplingParams


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "the file is not JSON: .*. Mend it."),
        (b"\xff", "the file is not UTF-8: .*. Mend it."),
        (b"(\xb5/\xfd\x04", "the file is not UTF-8, it begins as Zstandard does. Mend it."),
        ("[" * 100_000, "the file is JSON that is nested too deeply to be read. Mend it."),
        ("1" * 5000, "the file is not JSON: .*digits.*. Mend it."),
        ("[]", "the file is a JSON list, not an object. Mend it."),
        ("version https://git-lfs.github.com/spec/v1\noid", "the file is a pointer of Git LFS, .*git lfs pull"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "the file is a pointer of Git LFS, .*git lfs pull"),
        ("null", "the file is a JSON NoneType, not an object. Mend it."),
    ],
)
def test_what_is_wrong_is_one_error_with_the_place(text, why):
    with pytest.raises(PromptError, match=why):
        parse_json(text, "the file", dict, "Mend it.", PromptError)
    with pytest.raises(ConfigError):
        parse_json(text, "the file", dict, "Mend it.")


def test_a_key_that_an_object_has_twice_is_refused_where_each_has_to_count():
    text = '{"a": [{"b": 1, "c": 2, "b": 3}]}'
    assert parse_json(text, "the file", dict, "Mend it.") == {"a": [{"b": 3, "c": 2}]}
    with pytest.raises(ConfigError, match="^the file has the key 'b' twice in one object. Remove one of them.$"):
        parse_json(text, "the file", dict, "Mend it.", unique=True)


def test_what_is_right_is_returned():
    assert parse_json(b'{"a": [1]}', "the file", dict, "Mend it.") == {"a": [1]}
    assert parse_json("3", "the file", object, "Mend it.") == 3


def test_requests_come_back_as_they_were():
    requests = [
        Request(prompt_id=3, prompt_tokens=(1, 2), params=SamplingParams(max_new_tokens=2, stop=("x",))),
        Request(
            prompt_id=4,
            prompt_tokens=(5,),
            params=SamplingParams(max_new_tokens=1, logit_bias=((3, 1.5), (4, -2.0)), allowed_token_ids=(3, 4)),
        ),
        Request(
            prompt_id=5,
            prompt_tokens=(5,),
            params=SamplingParams(max_new_tokens=1),
            drafts=Drafts(answers=((1, 2), (), (3,)), ngrams=True),
        ),
    ]
    found = from_peer(json.dumps([dataclasses.asdict(each) for each in requests]), list[Request], "requests")
    assert found == requests and hash(found[1].params) == hash(requests[1].params)


@dataclasses.dataclass(frozen=True)
class Part:
    name: Literal["a", "b"]
    sizes: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    pair: tuple[int, str]
    shares: Mapping[str, float | None]
    rest: Any = None


GIVEN = {"parts": [{"name": "a", "sizes": [1, 2]}, {"name": "b"}], "pair": [1, "x"], "shares": {"y": 1, "z": None}}


def test_a_value_is_read_as_its_annotations_say():
    found = typed(Whole, json.loads(json.dumps(GIVEN | {"rest": [{}]})))
    assert found == Whole((Part("a", (1, 2)), Part("b")), (1, "x"), {"y": 1, "z": None}, [{}])


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": None},
        {"parts": {"name": "a"}},
        {"parts": [{"name": "c"}]},
        {"parts": [{"name": ["a"]}]},
        {"parts": [{}]},
        {"parts": [{"name": "a", "sizes": [True]}]},
        {"parts": [{"name": "a", "sizes": [1, 2**63]}]},
        {"parts": [{"name": "a", "other": 1}]},
        {"pair": [1]},
        {"pair": [1, "x", 2]},
        {"pair": ["x", 1]},
        {"shares": {"y": "1"}},
        {"shares": {"y": 10**400}},
        {"shares": [1]},
    ],
)
def test_a_value_of_another_kind_is_refused(wrong):
    with pytest.raises(HostError, match=r"it cannot be read \(TypeError: .*another version.*security\.md"):
        from_peer(json.dumps(GIVEN | wrong), Whole, "it")


def test_what_a_block_stumbles_over_is_one_error_but_not_an_error_of_the_machine():
    for stumble in (lambda: {}["a"], lambda: [].b, lambda: int("x"), lambda: 1 / 0, lambda: typed(int, "x")):
        with pytest.raises(PromptError, match="it cannot be read .* Mend it"), refused("it", "Mend it.", PromptError):
            stumble()
    with pytest.raises(PromptError, match="^taken over$"), refused("it", "Mend it.", PromptError):
        raise ConfigError("taken over")
    with pytest.raises(FileNotFoundError), refused("it", "Mend it."):
        open("/nowhere/at/all", encoding="utf-8")


def test_a_hundred_thousand_tokens_take_no_long():
    begin = time.process_time()
    assert len(typed(tuple[int, ...], list(range(1_000_000)))) == 1_000_000
    assert time.process_time() - begin < 5
