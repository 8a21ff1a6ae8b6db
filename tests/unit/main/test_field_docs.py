"""What docstrings say of the fields of a configuration."""

import dataclasses

from lockstep.main.field_docs import default_value, field_texts, first_paragraph, options_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A base.

    Args:
        first: The first one. None: no
            first.
        second: Described here.
    """

    first: int | None = None
    second: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """A class that
    goes on.

    And says more.
    """

    second: str = "x"
    """Described ``again``."""
    third: list[int] = dataclasses.field(default_factory=lambda: [1])


def test_a_field_has_the_text_of_the_last_class_that_says_something():
    assert field_texts(Derived) == {"first": "The first one. null: no first.", "second": "Described `again`."}
    assert field_texts(Base)["second"] == "Described here."


def test_the_rest():
    assert first_paragraph(Derived) == "A class that goes on."
    assert options_of(int | None) == [int] and options_of(str) == [str]
    defaults = {field.name: default_value(field) for field in dataclasses.fields(Derived)}
    assert defaults == {"first": None, "second": "x", "third": [1]}
    assert default_value(dataclasses.fields(Base)[1]) is dataclasses.MISSING
