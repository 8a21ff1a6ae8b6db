"""Writing systems of a text: how many letters it has of each, and whether an answer is in others than its prompt."""

import re
from typing import Final

import numpy as np

SCRIPT_SHARE, SCRIPT_LETTERS = 0.2, 10
"""The share and number of an answer's letters that are in scripts which its prompt does not have."""

_BLOCKS: Final = (
    (0x41, 0x5A, "Latin"), (0x61, 0x7A, "Latin"), (0xC0, 0x24F, "Latin"), (0x370, 0x3FF, "Greek"),
    (0x400, 0x52F, "Cyrillic"), (0x530, 0x58F, "Armenian"), (0x590, 0x5FF, "Hebrew"), (0x600, 0x77F, "Arabic"),
    (0x8A0, 0x8FF, "Arabic"), (0x900, 0x97F, "Devanagari"), (0x980, 0x9FF, "Bengali"), (0xA00, 0xA7F, "Gurmukhi"),
    (0xA80, 0xAFF, "Gujarati"), (0xB00, 0xB7F, "Oriya"), (0xB80, 0xBFF, "Tamil"), (0xC00, 0xC7F, "Telugu"),
    (0xC80, 0xCFF, "Kannada"), (0xD00, 0xD7F, "Malayalam"), (0xD80, 0xDFF, "Sinhala"), (0xE00, 0xE7F, "Thai"),
    (0xE80, 0xEFF, "Lao"), (0xF00, 0xFFF, "Tibetan"), (0x1000, 0x109F, "Myanmar"), (0x10A0, 0x10FF, "Georgian"),
    (0x1100, 0x11FF, "Hangul"), (0x1200, 0x139F, "Ethiopic"), (0x1780, 0x17FF, "Khmer"),
    (0x1800, 0x18AF, "Mongolian"), (0x1E00, 0x1EFF, "Latin"), (0x1F00, 0x1FFF, "Greek"), (0x3041, 0x30FF, "Kana"),
    (0x3130, 0x318F, "Hangul"), (0x31F0, 0x31FF, "Kana"), (0x3400, 0x4DBF, "Han"), (0x4E00, 0x9FFF, "Han"),
    (0xAC00, 0xD7AF, "Hangul"), (0xF900, 0xFAFF, "Han"), (0xFB50, 0xFDFF, "Arabic"), (0xFE70, 0xFEFE, "Arabic"),
    (0xFF21, 0xFF3A, "Latin"), (0xFF41, 0xFF5A, "Latin"), (0xFF66, 0xFF9D, "Kana"), (0x20000, 0x323AF, "Han"),
)  # fmt: skip
"""First and last code point of blocks of letters, and their script (Unicode 16, Scripts.txt, by whole blocks),
in order."""
_NAMES: Final = tuple(sorted({name for _, _, name in _BLOCKS}))
_EDGES: Final = np.array([edge for first, last, _ in _BLOCKS for edge in (first, last + 1)])
_SCRIPT: Final = np.array(
    [0, *(index for _, _, name in _BLOCKS for index in (1 + _NAMES.index(name), 0))]
)  # of a code point by the number of edges up to it; 0 for none
_NO_LETTERS: Final = np.array([0xD7, 0xF7])
_CODE: Final = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\[A-Za-z]+|https?://\S+", re.DOTALL)
_LATIN: Final = "Latin"
_LANGUAGES: Final = (
    "arabic|armenian|bengali|bulgarian|cantonese|chinese|cyrillic|english|farsi|french|georgian|german|greek|hangul|"
    "hebrew|hindi|hiragana|japanese|kanji|katakana|korean|latin|mandarin|persian|pinyin|punjabi|russian|sanskrit|"
    "serbian|spanish|tamil|telugu|thai|ukrainian|urdu|vietnamese"
)
_FOREIGN: Final = re.compile(
    rf"translat|transliterat|pronounc|\b(?:in|into|to|from) (?:{_LANGUAGES})\b"
    rf"|\b(?:{_LANGUAGES}) (?:alphabet|character|equivalent|letter|name|phrase|poem|script|sentence|term|text|word)"
    r"|[译訳譯]|번역|перев[ео]д|tradu[cz]|übersetz|ترجم"
    r"|[语語文]で|用.{0,4}[语語文]|英[语語]|한국어|영어|на \w+ском|по-\w+ски",
    re.IGNORECASE,
)
"""Words of a question that asks for another language."""


def script_letters(text: str) -> dict[str, int]:
    """The number of letters of each script in a text, without scripts that have none; digits, signs and space count
    for none.
    """
    if text.isascii():
        letters = sum(map(str.isalpha, text))
        return {"Latin": letters} if letters else {}
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    codes = codes[~np.isin(codes, _NO_LETTERS)]
    counts = np.bincount(_SCRIPT[np.searchsorted(_EDGES, codes, side="right")], minlength=len(_NAMES) + 1)
    return {name: int(count) for name, count in zip(_NAMES, counts[1:], strict=True) if count}


def is_in_other_script(text: str, prompt: str) -> bool:
    """Whether an answer has letters of scripts that its prompt does not have; code, formulas and addresses left out."""
    if text.isascii() and prompt.isascii():
        return False
    asked = script_letters(prompt)
    letters = script_letters(_CODE.sub(" ", text))
    total = sum(letters.values())
    foreign = total - sum(letters.get(script, 0) for script in {*asked, _LATIN})
    if "Kana" in asked and "Han" in letters and "Kana" not in letters:
        foreign = letters["Han"]  # Japanese is not written in Han alone
    if _LATIN in letters and asked.get(_LATIN, 0) <= SCRIPT_SHARE * sum(asked.values()):
        # Names and terms are Latin everywhere: it counts where nothing else is there.
        foreign = max(foreign, letters[_LATIN] if letters[_LATIN] == total and total >= 4 * SCRIPT_LETTERS else 0)
    enough = bool(asked) and foreign >= max(SCRIPT_LETTERS, SCRIPT_SHARE * total)
    return enough and _FOREIGN.search(prompt) is None
