"""A file of measured numbers of a chip, in place of the published ones.

It is JSON::

    {
      "lockstep_calibration": 1,
      "chip": "TPU v5p",
      "measured": "2026-11-22 on a v5p-16 with libtpu 0.0.46.3",
      "bandwidth": 2.4e12,
      "flops": 4.1e14,
      "link": {"bandwidth": 1.6e11, "latency_s": 4e-6, "hop_s": 1.2e-6},
      "network": {"bandwidth": 1.6e11, "latency_s": 4e-6, "hop_s": 1.2e-6}
    }

``bandwidth``, ``flops``, ``dcn``, ``link``, ``network`` and their entries have the meaning and the units of `Chip` and
`Link`. Each may be left out: the published number counts then. On TPU, where one interconnect joins all chips of a
slice, ``link`` counts for ``network`` too.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.json_text import parse_json
from lockstep.limits import read_small
from lockstep.placement.device.chips import Chip, Link, names_of_chips

FORMAT: Final = 1
"""The value of ``lockstep_calibration`` that this version reads."""

_LINKS: Final = ("link", "network")
_HEAD: Final = ("lockstep_calibration", "chip", "measured")
_NUMBERS: Final = ("bandwidth", "flops", "dcn")
_LINK_NUMBERS: Final = tuple(field.name for field in dataclasses.fields(Link))


def calibrated(chip: Chip, path: str | None) -> Chip:
    """Return a chip with the numbers of a calibration file.

    Args:
        path: The file; None leaves the chip as it is.

    Raises:
        ConfigError: The file cannot be read, says something else than numbers, or is of another chip.
    """
    if path is None:
        return chip
    content = _read(path)
    if content["chip"] != chip.name:
        raise ConfigError(
            f"the calibration {path} was measured on {content['chip']}, and the devices are {chip.name}. Give a file "
            f"that was measured on {chip.name}, or none to use the published numbers."
        )
    links: dict[str, Any] = {name: content[name] for name in _LINKS if name in content}
    if chip.network == chip.link and "link" in links:
        links = {"network": links["link"]} | links
    values: dict[str, Any] = {name: float(content[name]) for name in _NUMBERS if name in content}
    values |= {name: dataclasses.replace(getattr(chip, name), **numbers) for name, numbers in links.items()}
    return dataclasses.replace(
        chip,
        **values,
        source=f"measured {content['measured']} ({path}); what is not in that file: {chip.source}",
    )


def save_calibration(path: str | os.PathLike[str], **content: Any) -> None:
    """Write a calibration file, whole or not at all.

    Args:
        path: The file; what is there is replaced.
        content: The keys of the file, as the module describes them, without ``lockstep_calibration``.

    Raises:
        ConfigError: The content cannot be used, or the file cannot be written.
    """
    target = Path(path)
    _check(f"the calibration {target}", checked := {"lockstep_calibration": FORMAT} | content)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, json.dumps(checked, indent=2) + "\n")  # every process may write it
    except OSError as error:
        raise ConfigError(f"the calibration {target} cannot be written: {error}. Choose another file.") from error


def _read(path: str) -> dict[str, Any]:
    """The content of a calibration file, checked."""
    try:
        text = read_small(path)
    except OSError as error:
        raise ConfigError(
            f"the calibration {path} cannot be read: {error}. Give a file that every host has, or none to use the "
            "published numbers."
        ) from error
    content = parse_json(text, f"the calibration {path}", dict, "Write it again.")
    _check(f"the calibration {path}", content)
    return content


def _check(where: str, content: Any) -> None:
    """Refuse a content that cannot be used."""
    if not isinstance(content, dict) or content.get("lockstep_calibration") != FORMAT:
        version = content.get("lockstep_calibration") if isinstance(content, dict) else None
        raise ConfigError(
            f"{where} has lockstep_calibration {version!r}; this version reads {FORMAT}. Write it again with this "
            "version."
        )
    _check_keys(where, content, (*_HEAD, *_NUMBERS, *_LINKS))
    for name in ("chip", "measured"):
        if not isinstance(content.get(name), str) or not content[name]:
            raise ConfigError(f"{where} has {name} {content.get(name)!r}; it must be a text. Say {_HELP[name]}.")
    if content["chip"] not in names_of_chips():
        raise ConfigError(f"{where} has chip {content['chip']!r}; it must be one of {', '.join(names_of_chips())}.")
    for name in _NUMBERS:
        if name in content:
            _check_number(f"{where}: {name}", content[name], above=True)
    for name in _LINKS:
        if name not in content:
            continue
        if not isinstance(content[name], dict):
            raise ConfigError(
                f"{where}: {name} is {content[name]!r}; it must be an object with {_either(_LINK_NUMBERS)}."
            )
        _check_keys(f"{where}: {name}", content[name], _LINK_NUMBERS)
        for entry, value in content[name].items():
            _check_number(f"{where}: {name}.{entry}", value, above=entry == "bandwidth")


_HELP: Final = {"chip": "what was measured, such as TPU v5p", "measured": "when and on what"}


def _check_keys(where: str, content: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in content if name not in known]
    if unknown:
        raise ConfigError(f"{where} has {unknown[0]!r}, which is not known. It may have {_either(known)}.")


def _check_number(where: str, value: object, *, above: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above and value == 0):  # type: ignore[operator]
        least = "more than 0" if above else "at least 0"
        raise ConfigError(f"{where} is {value!r}; it must be a number of {least}, in bytes, operations and seconds.")


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
