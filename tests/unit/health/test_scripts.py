"""Letters by script."""

import unicodedata

import pytest

from lockstep.health import script_letters
from lockstep.health.scripts import _BLOCKS


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("", {}),
        ("12 + 7 = 19; (|---|)\n", {}),
        ("two words", {"Latin": 8}),
        ("naïve œuvre × ÷", {"Latin": 10}),
        ("Привет, мир", {"Cyrillic": 9}),
        ("東京は日本", {"Han": 4, "Kana": 1}),
        ("서울 x", {"Hangul": 2, "Latin": 1}),
        ("नमस्ते", {"Devanagari": 6}),
        ("你好𠀀🙂", {"Han": 3}),
        ("\ud800 \ufffd", {}),
    ],
)
def test_letters_are_counted_by_script(text, letters):
    assert script_letters(text) == letters


def test_blocks_are_in_order_and_have_letters_of_their_script():
    ends = [-1, *(last for _, last, _ in _BLOCKS)]
    assert all(end < first <= last for end, (first, last, _) in zip(ends[:-1], _BLOCKS, strict=True))
    words = {"Han": "CJK", "Kana": "KANA"}
    for first, last, script in _BLOCKS:
        names = [unicodedata.name(chr(code), "") for code in range(first, last + 1)]
        assert any(words.get(script, script.upper()) in name or "KATAKANA" in name for name in names), script
