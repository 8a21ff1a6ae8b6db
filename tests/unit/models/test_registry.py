"""Readers by class."""

import pytest

from lockstep.models.parameters import UnreadableModelError
from lockstep.models.registry import (
    class_name,
    has_reader,
    read_registered,
    register_reader,
    registered_classes,
)


class Theirs:
    """A model of somebody else's."""


class Special(Theirs):
    pass


@register_reader(Theirs)
def _read(model):
    return "read", model


def test_a_reader_reads_subclasses_too():
    model = Special()
    assert has_reader(Special) and read_registered(model) == ("read", model)


def test_a_closer_reader_comes_first():
    class Closest(Special):
        pass

    register_reader(Closest)(lambda model: ("closest", model))
    assert read_registered(Closest())[0] == "closest" and read_registered(Special())[0] == "read"


def test_a_class_without_a_reader_is_named_with_the_supported_ones():
    assert not has_reader(dict) and Theirs in set(registered_classes())
    with pytest.raises(UnreadableModelError, match=r"class builtins\.dict cannot be read; supported are .*Theirs"):
        read_registered({})


def test_what_is_supported_is_listed_without_tuple_and_object():
    with pytest.raises(UnreadableModelError) as caught:
        read_registered(1)
    assert "builtins.tuple" not in str(caught.value) and "builtins.object" not in str(caught.value)


def test_a_class_is_named_with_its_module():
    assert class_name(Theirs) == f"{__name__}.Theirs"
