"""The end of an answer: the token ids that a tokenizer, and the files beside a checkpoint, say it ends with."""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.json_text import parse_json
from lockstep.limits import read_object, read_small
from lockstep.printable import get_logger
from lockstep.urls import url_to_fs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

# End-of-turn tokens of chat families whose tokenizers name another token as the end of the sequence.
END_OF_TURN_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|call|>", "<end_of_turn>")
_END, _RETURN = "<|end|>", "<|return|>"  # with both (gpt-oss) `<|end|>` ends a message, and a turn has several
ENDING_FILES = ("generation_config.json", "config.json")
"""The files of a checkpoint that may say where an answer ends, in the order in which transformers asks them."""
_KEY, _TEXTS = "eos_token_id", "stop_strings"
_ATTRIBUTE = "lockstep_ending"  # the attribute of a tokenizer that has what `read_ending` returned at its loading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of an answer, as the files of a checkpoint say.

    Args:
        ids: The token ids; empty where no file says any.
        file: The file that says so, for messages.
        texts: The texts; empty where no file says any.
        texts_file: See ``file``.
    """

    ids: tuple[int, ...] = ()
    file: str = ""
    texts: tuple[str, ...] = ()
    texts_file: str = ""


def stop_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The token ids that end a completion; which they are, and who says so, is logged once.

    They are the tokenizer's end-of-sequence token; every ``eos_token_id`` of the checkpoint's
    ``generation_config.json``, or of its ``config.json`` where that has none, as transformers reads them; and the
    end-of-turn tokens of the chat families (such as ``<|eot_id|>`` and ``<|im_end|>``) that the tokenizer knows. The
    checkpoint is the one that the tokenizer was loaded for (`load_tokenizer`), else the files beside the tokenizer.
    An id that the tokenizer does not have is never sampled: a warning names its file.

    Raises:
        ConfigError: A file has an ``eos_token_id`` that is no token id.
    """
    sources = stop_sources(tokenizer)
    texts = [f"{token} {tokenizer.convert_ids_to_tokens(token)!r} ({source})" for token, source in sources.items()]
    _log_stops(", ".join(texts))
    return tuple(sorted(sources))


def stop_sources(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The token ids of `stop_ids`, each with who says so: the tokenizer, or a file."""
    vocab: dict[str, int] = tokenizer.get_vocab()
    sources: dict[int, str] = {}
    if tokenizer.eos_token_id is not None:
        sources[int(tokenizer.eos_token_id)] = "the tokenizer"
    ending = ending_of(tokenizer)
    largest = max(vocab.values(), default=-1)
    for token in ending.ids:
        if token > largest:
            _warn_of_unknown(token, ending.file, largest)
        else:
            sources.setdefault(token, ending.file)
    for text in END_OF_TURN_TOKENS:
        if text in vocab and (text != _END or _RETURN not in vocab):
            sources.setdefault(vocab[text], "the tokenizer")
    return sources


def keep_ending(tokenizer: "PreTrainedTokenizerBase", ending: Ending) -> None:
    """Have `stop_ids` of a tokenizer take what the files of its checkpoint say."""
    vars(tokenizer)[_ATTRIBUTE] = ending


def ending_of(tokenizer: "PreTrainedTokenizerBase") -> Ending:
    """The end of an answer as the files of a tokenizer's checkpoint say, or those beside it."""
    kept: Ending | None = vars(tokenizer).get(_ATTRIBUTE)
    return kept or read_ending(str(tokenizer.name_or_path))


def read_ending(*places: str) -> Ending:
    """Read what the first of some places with an ``eos_token_id`` says, and the ``stop_strings`` up to there.

    Args:
        places: Directories, URLs or names on the Hugging Face hub, which is not asked for a ``config.json``.

    Raises:
        ConfigError: A file cannot be parsed, or its ``eos_token_id`` is neither a token id nor a list of them, or its
            ``stop_strings`` no texts.
    """
    texts: dict[str, Any] = {}
    for place in places:
        for name in ENDING_FILES:
            file, settings = _settings(place, name)
            if name == ENDING_FILES[0] and not texts and settings.get(_TEXTS):
                texts = {"texts": _texts(settings[_TEXTS], file), "texts_file": file}
            listed = settings.get(_KEY, (settings.get("text_config") or {}).get(_KEY))
            ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
            if wrong := [token for token in ids if type(token) is not int or not 0 <= token < 2**31]:
                raise ConfigError(f"{file} has {_KEY} {wrong[0]!r}, which is no token id. Mend it.")
            if ids:
                return Ending(ids=tuple(ids), file=file, **texts)
    return Ending(**texts)


def _texts(stated: Any, file: str) -> tuple[str, ...]:
    """The ``stop_strings`` of a file: a text, or a list of them."""
    texts = stated if isinstance(stated, list) else [stated]
    if wrong := [text for text in texts if not isinstance(text, str) or not text]:
        raise ConfigError(f"{file} has {_TEXTS} {wrong[0]!r}, which is no text. Mend it.")
    return tuple(texts)


def _settings(place: str, name: str) -> tuple[str, dict[str, Any]]:
    """A file of a place, and what is in it; nothing where there is no such file."""
    file = f"{place.rstrip('/')}/{name}"
    if "://" in place:
        filesystem, path = url_to_fs(file)
        return file, parsed(read_object(filesystem, path), file) if filesystem.exists(path) else {}
    directory = Path(place).expanduser()
    if (directory / name).is_file():
        return file, parsed(read_small(directory / name), file)
    if name == ENDING_FILES[0] and place and may_be_hub_name(place) and not directory.is_dir():
        return f"{name} of {place}", hub_generation_config(place)
    return file, {}


def parsed(text: bytes, file: str) -> dict[str, Any]:
    """A settings file that is an object of JSON."""
    return parse_json(text, file, dict, "Mend it, or remove it.")


@functools.cache
def hub_generation_config(name: str) -> dict[str, Any]:
    """The ``generation_config.json`` of a name on the hub, which is asked once; empty where there is none."""
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils.hub import cached_file

    file_name = ENDING_FILES[0]
    try:
        file = cached_file(name, file_name)
        return parsed(read_small(file), file) if file else {}
    except OSError as error:
        # The cache also remembers that the hub has no such file; only where it says nothing the answer is not known.
        if try_to_load_from_cache(name, file_name) is None:
            log.warning(
                "%s of the tokenizer %r is neither in the cache of the Hugging Face hub nor could it be fetched (%s): "
                "answers end at the tokenizer's own end-of-sequence and end-of-turn tokens alone. Fetch it once with "
                "a network, or point tokenizer at a directory that has it.",
                file_name,
                name,
                str(error).strip().split("\n")[0],
            )
        return {}


def may_be_hub_name(name: str) -> bool:
    """Whether the hub could know this name: ``model`` or ``org/model``, not a path or an address."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name


@functools.cache
def _log_stops(stops: str) -> None:
    if stops:
        log.info("an answer ends with %s", stops)
    else:
        log.warning(
            "an answer ends with no token: neither the tokenizer nor a file beside the checkpoint names one, so each "
            "is as long as max_new_tokens, but for stop and stop_token_ids. Use a tokenizer with an eos_token"
        )


@functools.cache
def _warn_of_unknown(token: int, file: str, largest: int) -> None:
    log.warning(
        "%s has %s %d, and the tokenizer has the ids 0 to %d: no answer ends with it, and it is left out. Correct the "
        "file, or use the tokenizer that the model was trained with.",
        file,
        _KEY,
        token,
        largest,
    )
