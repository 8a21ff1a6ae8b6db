"""YAML that somebody else may have written: within limits, each key once, and errors that show no line of it."""

import os
import select
import stat
import typing
from typing import Any

import yaml
from draccus.parsers.yaml_loader import SafeLoaderWithInclusion

from lockstep.errors import ConfigError
from lockstep.files import at_once
from lockstep.limits import CONFIGURATION_BYTES, CONFIGURATION_VALUES

PIPE_S = 30.0
"""Seconds in which the first byte of a configuration must come where it is a pipe."""


class WrittenInteger(int):
    """A whole number that is not written as Python does: ``007``, ``12:30``."""

    source: str


class WrittenFloat(float):
    """The same of other numbers: ``1.50``."""

    source: str


class _Loader(SafeLoaderWithInclusion):
    """Safe YAML with each key of a mapping once, and numbers that know how they are written."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return typing.cast(yaml.MappingNode, node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Take in what ``<<`` names: merges of merges can be more than any memory has."""
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                count = 0
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(part, yaml.MappingNode):
                        self.flatten_mapping(part)
                        count += len(part.value)
                    if count > CONFIGURATION_VALUES:
                        problem = f"more than {CONFIGURATION_VALUES:,} values are merged here"
                        raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        super().flatten_mapping(node)  # type: ignore[no-untyped-call]  # PyYAML's

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        integer = node.tag.endswith(":int")
        value = self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)
        if str(value) == node.value:
            return typing.cast(int | float, value)
        number: WrittenInteger | WrittenFloat = WrittenInteger(value) if integer else WrittenFloat(value)
        number.source = node.value
        return number


for _name in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _Loader.construct_number)
for _name in ("timestamp", "value"):  # no key has a date, and "=" is a text
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _Loader.construct_yaml_str)
_Loader.add_constructor("!include", _Loader.construct_undefined)


def load_yaml(text: str) -> Any:
    """The value of a text of YAML."""
    return yaml.load(text, _Loader)


def read_yaml(path: str, key: str = "config_path") -> tuple[dict[str, Any], str]:
    """Values and text of a file that a key of the command line names."""
    try:
        with open(os.path.expanduser(path), "rb", opener=at_once) as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):  # such as bash's <(…)
                if not select.select([file], [], [], PIPE_S)[0]:
                    raise TimeoutError(f"it is a pipe, and nothing was written to it within {PIPE_S:g} s")
                os.set_blocking(file.fileno(), True)
            text = file.read(CONFIGURATION_BYTES + 1).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--{key} {path} is no text in UTF-8 ({error.reason} at byte {error.start}). Save it so."
        ) from None
    except OSError as error:
        raise ConfigError(f"--{key} {path} cannot be read: {error}. Check the path.") from error
    if len(text) > CONFIGURATION_BYTES:
        raise ConfigError(f"{path} has more than {CONFIGURATION_BYTES:,} bytes. Put prompts into a file of their own.")
    try:
        values = load_yaml(text) if text else text
    except Exception as error:  # the YAML parser has its own errors
        fix = "Replace its no-break spaces (U+00A0) by spaces" if "\u00a0" in text else "Correct it there"
        raise ConfigError(f"{path} is not YAML: {yaml_reason(error)}. {fix}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a mapping. Write 'key: value' lines.")
    if _is_longer(values, CONFIGURATION_VALUES):
        raise ConfigError(
            f"{path} has more than {CONFIGURATION_VALUES:,} values, those of aliases (*) counted. Write fewer."
        )
    return values, text


def yaml_reason(error: Exception) -> str:
    """An error of the YAML parser without the line that it shows, which may have a password."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return type(error).__name__ if isinstance(error, yaml.YAMLError) else str(error)
    return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"


def _is_longer(values: Any, limit: int) -> bool:
    """Whether there are more values than a limit: aliases of aliases can be more than any memory has, or endless."""
    left, count = [values], 0
    while left and count <= limit:
        value, count = left.pop(), count + 1
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list | set | tuple) else ()
    return count > limit
