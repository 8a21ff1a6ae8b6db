"""Variables of a chat template that a run sets: ``enable_thinking`` of Qwen3, tools that it describes."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from lockstep.errors import ConfigError, PromptError
from lockstep.json_text import parse_json, without_nulls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_JSON: Final = (str, int, float, bool, list, dict, tuple, type(None), Any)
_ATTRIBUTE: Final = "lockstep_template_kwargs"  # the attribute of a tokenizer that has them
_OWN: Final = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"),
    *("lockstep_date", "strftime_now", "conversation", "padding", "truncation", "max_length", "return_tensors"),
)
"""Names that the caller of a template, or `apply_chat_template` of transformers, gives a meaning of its own."""


def set_template_kwargs(tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any]) -> None:
    """Have the chat template of a tokenizer see variables in every chat; they are in `tokenizer_digest`.

    Args:
        kwargs: Their values by name, as ``apply_chat_template`` of transformers takes them.

    Raises:
        ConfigError: One has the name of a variable that every chat has, or the template does not mention it.
    """
    if not kwargs:
        return
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template
    for name in kwargs:
        if name in _OWN or name in tokenizer.special_tokens_map:
            raise ConfigError(
                f"chat_template_kwargs has {name}, which every chat has a value of its own for. Remove it."
            )
        # Its program is not parsed here: a name that it has in no word cannot change what it writes.
        if not own and not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template or "")):
            raise ConfigError(
                f"chat_template_kwargs has {name}, which the chat template of tokenizer "
                f"{str(tokenizer.name_or_path)!r} does not mention: it would do nothing. Correct or remove it."
            )
    vars(tokenizer)[_ATTRIBUTE] = dict(kwargs)


def set_tools(
    tokenizer: "PreTrainedTokenizerBase", functions: Sequence[Callable[..., Any] | Mapping[str, Any]]
) -> None:
    """Have the chat template of a tokenizer describe functions in every chat; they are in `tokenizer_digest`.

    Args:
        functions: Functions with a type for each argument, and a docstring that describes it and each of them, as
            ``get_json_schema`` of transformers reads them; or the schemas themselves.

    Raises:
        ConfigError: A function has no such types and docstring, or the template does not mention tools.
    """
    if isinstance(functions, str | Mapping) or not isinstance(functions, Sequence):
        raise ConfigError(f"tools() of the environment returned {functions!r:.200}; it must be a list. Correct it.")
    if not functions:
        return
    from transformers.utils.chat_template_utils import get_json_schema

    if not re.search(r"\btools\b", str(tokenizer.chat_template or "")):
        raise ConfigError(
            f"the environment has tools, which the chat template of tokenizer {str(tokenizer.name_or_path)!r} does not "
            "mention: the model would not know of them. Use a tokenizer whose template does, or describe them in the "
            "environment's first messages and leave tools() out."
        )
    schemas = []
    for function in functions:
        try:
            if not isinstance(function, Mapping):
                _check_arguments(function)  # first: newer versions of transformers refuse some with other words
            schemas.append(dict(function) if isinstance(function, Mapping) else get_json_schema(function))
        except Exception as error:  # of several kinds, not all of which transformers exports
            raise ConfigError(
                f"the tool {getattr(function, '__name__', function)!r} of the environment cannot be described "
                f"({error}). Give each argument a type, and the function a docstring in Google's style, with a line "
                "for each of Args."
            ) from error
    names = [schema.get("function", schema).get("name") for schema in schemas]
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ConfigError(f"the environment has two tools called {twice[0]!r}. Rename or remove one.")
    vars(tokenizer)[_ATTRIBUTE] = {**template_kwargs(tokenizer), "tools": schemas}


def _check_arguments(function: Callable[..., Any]) -> None:
    """Refuse what is no function that returns, and arguments that a call, which is JSON, cannot give."""
    if not inspect.isroutine(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        kind = "yields" if inspect.isroutine(function) else f"is an object of the class {type(function).__name__}"
        raise TypeError(f"it {kind}; a tool is a function with def that returns what the model reads")
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{parameter} has no name that a call could give a value of its own")
        if wrong := _no_json(hints.get(name)):
            raise TypeError(f"{name} has the type {wrong.__name__}, and a call gives what JSON has")


def _no_json(hint: Any) -> type | None:
    """The first class in a type that no value of JSON is of; None for none."""
    if typing.get_origin(hint) is Literal:
        return None
    if arguments := typing.get_args(hint):
        return next(filter(None, map(_no_json, arguments)), None)
    return hint if isinstance(hint, type) and hint not in _JSON and not typing.is_typeddict(hint) else None


def stored_tools(value: object) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a chat as its record has them: a list of schemas or its JSON text, without the nulls of a
    column's other records; none where it has none.

    Raises:
        PromptError: They are something else.
    """
    fix = "Write a list of the schemas of functions, or rename the field where it is something else."
    listed = parse_json(value, "'tools'", object, fix, PromptError) if isinstance(value, str) and value else value
    if not listed:
        return ()
    if not isinstance(listed, list | tuple) or not all(isinstance(tool, Mapping) for tool in listed):
        raise PromptError(f"'tools' is {listed!r:.200}, which is no list of functions. {fix}")
    return list(without_nulls(listed))


def template_kwargs(tokenizer: Any) -> Mapping[str, Any]:
    """Return the variables that `set_template_kwargs` has set."""
    kwargs: Mapping[str, Any] = getattr(tokenizer, _ATTRIBUTE, {})
    return kwargs
