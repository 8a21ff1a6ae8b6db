"""Groups of prompts by what they have in common: code, length, script, number of turns, further fields of a line."""

import collections
import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from lockstep.health.scripts import script_letters
from lockstep.printable import visible
from lockstep.text import Prompt

LENGTHS: Final = (200, 2000)
"""Characters from which on a prompt is one of middle length, and a long one."""
MAX_VALUES: Final = 8
"""The number of values from which on a field is the name of a prompt rather than a kind of it."""
MAX_CHARACTERS: Final = 40  # of a field's name or value in the name of a group
_CODE: Final = re.compile(
    r"```|~~~|^(?: {4}|\t)\S.*[;{}()=:]\s*$|^\s*(?:def|class|import|from \w+ import|#include|function|public|SELECT) ",
    re.MULTILINE,
)


def prompt_groups(prompts: Sequence[Prompt]) -> list[tuple[str, ...]]:
    r"""The names of the groups that each prompt of a round belongs to.

    A field of the prompts' lines makes groups where it has two to `MAX_VALUES` values, each a text, a whole number or a
    truth value, most of them more than once.

    Example:
        >>> code, plain = (Prompt(id=i, text=text) for i, text in enumerate(["```\nx\n``` Explain.", "Who was he?"]))
        >>> prompt_groups([code, plain])[0]
        ('code', 'prompts under 200 characters', '1 turn', 'script Latin')
    """
    fields = _grouping_fields(prompts)
    return [(*_groups(prompt), *_field_groups(prompt, fields)) for prompt in prompts]


def _groups(prompt: Prompt) -> Iterator[str]:
    text, messages = prompt.shown, prompt.messages or ({},)
    yield "code" if _CODE.search(text) else "no code"
    short, middle = LENGTHS
    if len(text) < short:
        yield f"prompts under {short:,} characters"
    elif len(text) < middle:
        yield f"prompts of {short:,} to {middle:,} characters"
    else:
        yield f"prompts over {middle:,} characters"
    turns = max(1, sum(message.get("role") == "user" for message in messages))
    yield f"{turns} turn{'s' * (turns > 1)}" if turns < 4 else "4 turns or more"
    letters = script_letters(text)
    # Japanese is written with Han letters too.
    script = "Kana" if "Kana" in letters else max(letters, key=lambda name: letters[name], default="")
    yield f"script {script}" if script else "no letters"


def _field_groups(prompt: Prompt, fields: Sequence[str]) -> Iterator[str]:
    for name in fields:
        if name in prompt.fields:
            value = prompt.fields[name]
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{visible(name)[:MAX_CHARACTERS]} {visible(text)[:MAX_CHARACTERS]}"


def _grouping_fields(prompts: Sequence[Prompt]) -> list[str]:
    values: collections.defaultdict[str, list[object]] = collections.defaultdict(list)
    for prompt in prompts:
        for name, value in prompt.fields.items():
            values[name].append(value)
    return [
        name
        for name, own in values.items()
        if all(value is None or isinstance(value, str | int) for value in own)
        and 2 <= len(set(own)) <= min(MAX_VALUES, len(own) // 2)
    ]
