"""The platforms, by what their compilers ask of a program, and how their devices are joined."""

import dataclasses
from collections.abc import Mapping
from typing import Final


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """A platform, as far as programs are made for it."""

    pages_one_by_one: bool = False
    """Whether pages are read and written one at a time, in place: a copy of a small page takes as long as of a large
    one."""
    sorts_lists: bool = False
    """Whether it finds the largest of a list by sorting it, which takes long to compile; a pass over the vocabulary in
    its place costs little."""
    reduces_all: bool = False
    """Whether it makes an all-reduce of a sum that is scattered over all devices (ADR 17)."""
    lanes: int | None = None
    """The number of which a part of a weight's width has to be a multiple, or each launch makes a padded copy of the
    weight; None for any."""
    splash: bool = False
    """Whether jax's splash attention, a kernel, runs on it."""
    slices: bool = False
    """Whether its devices know their slice, inside which no network separates hosts."""


_PLATFORMS: Final[Mapping[str, Platform]] = {
    "tpu": Platform(pages_one_by_one=True, sorts_lists=True, reduces_all=True, lanes=128, splash=True, slices=True),
}


def platform_of(name: str) -> Platform:
    """The platform of a name as ``jax.Device.platform`` has it."""
    return _PLATFORMS.get(name, Platform())
