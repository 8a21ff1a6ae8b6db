"""The groups of prompts."""

import pytest

from lockstep.health.groups import MAX_VALUES, prompt_groups
from lockstep.text import Prompt


def groups_of(text=None, **fields):
    return prompt_groups([Prompt(id=0, text=text, **fields)])[0]


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("Explain\n```python\nx = 1\n```", "code"),
        ("def add(a, b):\n    return a + b", "code"),
        ("#include <stdio.h>", "code"),
        ("import numpy as np", "code"),
        ("I import cars. Is a class or a function better for me?", "no code"),
        ("What is `x`?", "no code"),
        ("x" * 199, "prompts under 200 characters"),
        ("x" * 200, "prompts of 200 to 2,000 characters"),
        ("x" * 2001, "prompts over 2,000 characters"),
        ("Сколько будет 2 + 2?", "script Cyrillic"),
        ("今日は何曜日ですか", "script Kana"),
        ("2 + 2 = ?", "no letters"),
    ],
)
def test_a_prompt_belongs_to_the_groups_of_its_text(text, group):
    assert group in groups_of(text)


def test_turns_are_those_of_the_user():
    def chat(count):
        turns = [{"role": role, "content": "x"} for _ in range(count) for role in ("user", "assistant")]
        return groups_of(messages=({"role": "system", "content": "Be brief."}, *turns[:-1]))

    assert [next(g for g in chat(n) if "turn" in g) for n in (1, 2, 3, 4, 9)] == [
        "1 turn", "2 turns", "3 turns", "4 turns or more", "4 turns or more",
    ]  # fmt: skip


def test_a_field_with_few_values_makes_groups():
    def fields(place):
        return {
            "subject": ["maths", "law"][place % 2],
            "id": f"row {place}",
            "grade": place % (MAX_VALUES + 1),
            "x": [1],
        }

    prompts = [Prompt(id=i, text="hi", fields=fields(i)) for i in range(40)]
    own = [set(groups) - set(groups_of("hi")) for groups in prompt_groups(prompts)]
    assert own[0] == {"subject maths"} and own[1] == {"subject law"} and len(own) == 40


def test_a_name_of_a_group_can_be_printed():
    prompts = [Prompt(id=i, text="hi", fields={"a\x1b[31m": "b\n" * 99 if i % 2 else None}) for i in range(8)]
    groups = {group for own in prompt_groups(prompts) for group in own}
    assert "a\\x1b[31m null" in groups and all(group.isprintable() and len(group) < 90 for group in groups)
