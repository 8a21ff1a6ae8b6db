"""Configurations from a YAML file and ``--a.b value`` overrides."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from lockstep.configuration import decode_config, load_yaml, read_yaml, yaml_reason
from lockstep.errors import ConfigError
from lockstep.plugins import modules_beside
from lockstep.printable import SECRET_OPTION

CONFIG_PATH = "config_path"
BASE_MODEL = "base_model"  # the key of a base model, or of the configuration of the run that was initialized from it


def parse_arguments[Config](cls: type[Config], arguments: Sequence[str]) -> Config:
    """Build a configuration from a command line.

    Args:
        arguments: ``--config_path FILE`` and ``--key.in.dots VALUE`` or ``--key.in.dots=VALUE``. Values are YAML; of
            several for a key the last wins. The caller handles ``--help``.

    Raises:
        ConfigError: An argument or the file cannot be read, a key is unknown, or a value is out of its range.
    """
    path = dict(pairs(arguments)).get(CONFIG_PATH)
    values = read_values(arguments)
    where = "the command line" if path is None else f"{path} (or the command line)"
    return decode_config(cls, values, where)


def name_words(arguments: Sequence[str], keys: Sequence[str], usage: str) -> list[str]:
    """Put a key before each word of a command line that has none."""
    left, rest, named = list(keys), list(arguments), list[str]()
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            named.append(word)
            if "=" not in word and rest and not rest[0].startswith("--"):
                named.append(rest.pop(0))
        elif left:
            named += [f"--{left.pop(0)}", word]
        else:
            raise ConfigError(f"{word!r} is one word too many: {usage}.")
    return named


def read_values(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command line and its file, before they are made a configuration.

    The directory of the file comes last on ``sys.path`` where a module that it names (``module:name``) is there.
    """
    overrides = dict(pairs(arguments))
    path = overrides.pop(CONFIG_PATH, None)
    values: dict[str, Any] = {}
    if path is not None:
        values, text = read_yaml(str(path))
        folder = os.path.dirname(os.path.abspath(os.path.expanduser(path)))
        # Last: a file of the user's takes no name from a package that is imported later.
        if folder not in sys.path and modules_beside(path, " ".join((text, *arguments))):
            sys.path.append(folder)
    for key, value in overrides.items():
        _set(values, key, value)
    if isinstance(base := values.get(BASE_MODEL), str) and base.endswith((".yaml", ".yml")):
        values[BASE_MODEL] = _base_of_run(base)
    return values


def _base_of_run(path: str) -> str:
    """The base model that the configuration of a training run names."""
    base = read_yaml(path, BASE_MODEL)[0].get("initialize_from_hf")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"base_model is the configuration {path!r}, which names no initialize_from_hf. Give the directory or URL "
            "of the base model itself."
        )
    return base


def pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The keys of a command line with their values; that of `CONFIG_PATH` is a text."""
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag.partition("=")[0] in ("--", "--config"):
            raise ConfigError(f"argument {flag!r} was not expected. Write --{CONFIG_PATH} FILE or --key VALUE.")
        key, equals, text = flag[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"argument --{key} has no value. Write --{key} VALUE (true or false for a switch).")
            text = rest.pop(0)
        try:
            yield key, text if key == CONFIG_PATH or not text else _value(text)
        except Exception as error:  # the YAML parser has its own errors
            shown = "a value" if SECRET_OPTION.search(key) else f"the value {text!r}"
            raise ConfigError(
                f"argument --{key} has {shown}, which is not YAML: {yaml_reason(error)}. Quote it."
            ) from None


def _value(text: str) -> Any:
    """The value of an argument, of which nothing is a comment."""
    node = yaml.compose(text, yaml.SafeLoader)
    if "#" in text[node.end_mark.index if node else 0 :]:
        raise ValueError("what follows # is a comment")
    return load_yaml(text)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents, 1):
        inner = values.get(parent)
        if isinstance(inner, list):
            whole = ".".join(parents[:depth])
            raise ConfigError(f"--{key}: {whole} is a list in the file. Give all of it: --{whole} '[…]'.")
        values[parent] = values = dict(inner) if isinstance(inner, dict) else {}  # an alias has the same one elsewhere
    values[last] = value
