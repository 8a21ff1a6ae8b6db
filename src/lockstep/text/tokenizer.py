"""Hugging Face tokenizers: loading one, its stop tokens, and whether it fits the model."""

import functools
import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.files import write_file
from lockstep.json_text import FOREIGN, parse_json, read_small
from lockstep.printable import get_logger
from lockstep.text.tokenize import panics_as_errors
from lockstep.urls import check_bare_name, patient_with_hub, url_to_fs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = get_logger(__name__)

# End-of-turn tokens of chat families whose tokenizers name another token as the end of the sequence.
END_OF_TURN_TOKENS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_END, _RETURN = "<|end|>", "<|return|>"  # with both (gpt-oss) `<|end|>` ends a message, and a turn has several
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""The suffixes of files that may belong to a tokenizer; weights, which may be beside it, have others."""
_WITH_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""The files whose keys are arguments of a tokenizer's class."""
_NAMES_FILES = re.compile("_(files?|dir|path|spm)$|^(vocab|merges)$")
"""Arguments that are names of files: all that tokenizers of transformers read have such names."""
_GENERATION_CONFIG = "generation_config.json"
_FETCHED = "lockstep_generation_config"  # the attribute of a tokenizer that was fetched which has what is in that file
_CONTEXT = 8
_CHARACTER_TOKENS = 4
_OF_LAST_CALL = ("padding", "truncation")  # parts of a fast tokenizer's backend that every call sets anew


def load_tokenizer(
    path: str | os.PathLike[str], trust_remote_code: str | None = None, fetched: bytes = b""
) -> "PreTrainedTokenizerBase":
    """Load a tokenizer with ``transformers.AutoTokenizer``.

    Args:
        path: A directory or URL with a tokenizer, or a name on the Hugging Face hub such as ``org/model``. A directory
            is read without any network access.
        trust_remote_code: The ``path`` again, where Python code that the tokenizer brings may be run, of a name on the
            hub with the commit (``org/model@COMMIT``): each host fetches it itself. None: none is run.
        fetched: What `fetch_tokenizer` returned on this host or another; empty to read what is at ``path``.

    Raises:
        ConfigError: There is no such directory or name, or what is there is not a tokenizer, one that names files
            elsewhere, or one with code of its own that is not trusted; or ``trust_remote_code`` names another one.
    """
    name = os.fspath(path)
    if not name:
        raise ConfigError("tokenizer is empty. Set it to a tokenizer directory or a Hugging Face hub name (org/model).")
    commit = _commit_of_code(name, trust_remote_code)
    if commit is None:
        if fetched or _is_remote(name):
            return _from_files(name, fetched or fetch_tokenizer(name))
    elif "://" in name:
        return _from_files(name, _archive(name, _files_at_url(name, (*_SUFFIXES, ".py"))), trusted=True)
    return _load(name, commit)


def _commit_of_code(name: str, trust_remote_code: str | None) -> str | None:
    """The commit of the hub at which a tokenizer's code is run, empty where it is at a path or URL; None: none is."""
    if trust_remote_code is None:
        return None
    trusted, _, commit = trust_remote_code.partition("@") if _is_on_hub(name) else (trust_remote_code, "", "")
    if trusted != name:
        raise ConfigError(
            f"trust_remote_code is {trust_remote_code!r}, and the tokenizer is {name!r}: code is run of the tokenizer "
            "that is named there alone. Write the same in both, or leave trust_remote_code out."
        )
    if _is_on_hub(name) and not re.fullmatch("[0-9a-f]{40}", commit):
        raise ConfigError(
            f"trust_remote_code is {trust_remote_code!r}: code from the Hugging Face hub is run at one commit, which "
            f"nobody can change. Write --trust_remote_code {name}@COMMIT with the 40 hexadecimal digits of one in "
            f"https://huggingface.co/{name}/commits."
        )
    return commit


def _load(name: str, commit: str | None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a directory or of the hub, its own code, of a commit, where ``commit`` is not None."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        _check_files(name, [file.name for file in directory.iterdir()])
        for file in _WITH_FILES:
            if (directory / file).is_file():
                _check_named_files(read_small(directory / file), f"{name}/{file}")
    elif not _may_be_hub_name(name):
        raise ConfigError(
            f"tokenizer {name!r} was not found: looked for the directory {str(directory.absolute())!r}, and it does "
            "not have the form of a Hugging Face hub name (org/model). Fix the path (relative paths start at the "
            "working directory), or copy the tokenizer to a local directory."
        )
    try:
        # Said either way: without it transformers asks at the terminal whether to run what is beside the tokenizer.
        place = str(directory) if directory.is_dir() else name
        pinned = {"revision": commit, "code_revision": commit} if commit else {}
        load = functools.partial(
            _auto_tokenizer().from_pretrained, place, trust_remote_code=commit is not None, **pinned
        )
        return load() if directory.is_dir() else patient_with_hub(f"the tokenizer {name!r}", load)
    except Exception as error:  # AutoTokenizer raises whatever its parser or its download raised
        first_line = str(error).strip().split("\n")[0]
        where = (
            f"the directory {name!r} could not be read as a tokenizer"
            if directory.is_dir()
            else f"tokenizer {name!r} is neither a local directory nor could it be loaded from the Hugging Face hub"
        )
        fix = "Check the name, or point tokenizer at a directory that tokenizer.save_pretrained() wrote."
        if "trust_remote_code" in str(error):
            first_line = "it brings Python code of its own, which is not run"
            at = "" if directory.is_dir() else "@COMMIT"
            fix = f"If you trust it, name it in trust_remote_code too: --trust_remote_code {name}{at}."
        raise ConfigError(f"{where} ({type(error).__name__}: {first_line}). {fix}") from error


def fetch_tokenizer(path: str | os.PathLike[str], trust_remote_code: str | None = None) -> bytes:
    """Return the files of a tokenizer at a URL or on the Hugging Face hub, for one host to ask for and all to have.

    Returns:
        The files as a zip archive; nothing for a directory, which each host has itself, and for a tokenizer with code,
        which nobody sends: each host fetches it.
    """
    name = os.fspath(path)
    if _commit_of_code(name, trust_remote_code) is not None or not _is_remote(name):
        return b""
    if "://" in name:
        return _archive(name, patient_with_hub(f"the tokenizer {name!r}", lambda: _files_at_url(name, _SUFFIXES)))
    return _archive(name, _files_on_hub(name))


def _archive(name: str, files: Mapping[str, bytes]) -> bytes:
    _check_files(name, list(files))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for file, data in files.items():
            target.writestr(file, data)
    return archive.getvalue()


def _files_at_url(url: str, suffixes: tuple[str, ...]) -> dict[str, bytes]:
    filesystem, root = url_to_fs(url)
    try:
        listed = [path for path in filesystem.ls(root, detail=False) if path.endswith(suffixes)]
    except FileNotFoundError:
        listed = []
    return {path.rpartition("/")[2]: filesystem.cat_file(path) for path in listed}


def _files_on_hub(name: str) -> dict[str, bytes]:
    from huggingface_hub import snapshot_download

    # The directory of further chat templates is the only one that belongs to a tokenizer.
    allowed, ignored = [f"*{suffix}" for suffix in _SUFFIXES], ["*/*/*", "[!a]*/*"]

    def download() -> str:
        return snapshot_download(name, allow_patterns=allowed, ignore_patterns=ignored)

    try:
        place = Path(patient_with_hub(f"the tokenizer {name!r}", download))
    except ConfigError:
        raise
    except Exception:
        _load(name, None)  # says what is wrong with the name
        raise
    found = [file for file in place.rglob("*") if file.is_file() and file.name.endswith(_SUFFIXES)]
    files = {file.relative_to(place).as_posix(): file.read_bytes() for file in found}
    if _GENERATION_CONFIG not in files and (settings := _hub_generation_config(name)):
        files[_GENERATION_CONFIG] = json.dumps(settings).encode()
    return files


def _from_files(name: str, fetched: bytes, *, trusted: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of files, which are written to a temporary directory to be read."""
    place = f"what process 0 fetched of the tokenizer {name!r}"
    with tempfile.TemporaryDirectory(prefix="lockstep-tokenizer-") as copy:
        try:
            with zipfile.ZipFile(io.BytesIO(fetched)) as archive:
                for file in archive.namelist():
                    target = Path(copy, *(check_bare_name(part, place) for part in file.split("/")))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write_file(target, archive.read(file))
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
            raise ConfigError(f"{place} cannot be read ({error}). {FOREIGN}") from error
        try:
            tokenizer = _load(copy, "" if trusted else None)
            settings = _generation_config(copy)
        except ConfigError as error:
            raise ConfigError(str(error).replace(copy, name)) from error
    tokenizer.name_or_path = name
    vars(tokenizer)[_FETCHED] = settings
    return tokenizer


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A digest of all that decides which tokens a text has and which text tokens have.

    For a fast tokenizer that is its whole backend (normaliser, merges, post-processor, decoder, added tokens), for a
    slow one its vocabulary and the arguments that it was made with; for both the class, special tokens and chat
    template. The place that it was loaded from, and the padding and truncation of its last call, do not count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        parts = {name: part for name, part in json.loads(backend.to_str()).items() if name not in _OF_LAST_CALL}
    else:
        settings = {name: value for name, value in tokenizer.init_kwargs.items() if not _is_place(name)}
        parts = {"vocab": tokenizer.get_vocab(), "init_kwargs": settings, "added": tokenizer.added_tokens_decoder}
    parts |= {
        "class": type(tokenizer).__name__,
        "special tokens": tokenizer.special_tokens_map,
        "chat template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def token_count(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the largest token id; the model's embedding may have more rows."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocab(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Check that every token id of the tokenizer has a row in the model's embedding."""
    vocab: dict[str, int] = tokenizer.get_vocab()
    token, largest = max(vocab.items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ConfigError(
            f"tokenizer and model vocabulary do not match: the tokenizer's largest token id is {largest} ({token!r}), "
            f"the model's vocabulary has {vocab_size} entries (ids 0 to {vocab_size - 1}). Use the tokenizer the "
            f"model was trained with, or a model with a vocabulary of at least {largest + 1}."
        )


def stop_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The token ids that end a completion.

    They are the tokenizer's end-of-sequence token, every ``eos_token_id`` of a ``generation_config.json`` beside it
    (of a tokenizer from the Hugging Face hub: in the hub or its local cache, else a warning says that it is not known),
    and the end-of-turn tokens of the chat families (such as ``<|eot_id|>`` and ``<|im_end|>``) that it knows.
    """
    ids: set[int] = set()
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    vocab: dict[str, int] = tokenizer.get_vocab()
    ends = [token for token in END_OF_TURN_TOKENS if token != _END or _RETURN not in vocab]
    ids.update(vocab[token] for token in ends if token in vocab)
    known = vars(tokenizer).get(_FETCHED)
    settings: dict[str, Any] = _generation_config(str(tokenizer.name_or_path)) if known is None else known
    listed = settings.get("eos_token_id")
    named = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if wrong := [each for each in named if type(each) is not int or not 0 <= each < 2**31]:
        raise ConfigError(f"{_GENERATION_CONFIG} of {tokenizer.name_or_path} has eos_token_id {wrong[0]!r}. Mend it.")
    ids.update(named)
    return tuple(sorted(ids))


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """The special tokens, which are no part of a text (`decode`), with their ids: those that the tokenizer names, and
    others that were added as such, like Llama 3's ``<|start_header_id|>``.
    """
    named: dict[str, Any] = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    found = named | {str(token): number for number, token in added.items() if token.special}
    return {text: int(token) for text, token in found.items() if text and token is not None}


def write_tokenizer(tokenizer: Any, directory: str | os.PathLike[str]) -> None:
    """Write a tokenizer's files, and its `stop_ids` as a ``generation_config.json``, which ``save_pretrained`` leaves
    out; without it, who loads the files goes on where an answer ends.
    """
    tokenizer.save_pretrained(os.fspath(directory))
    settings = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "pad_token_id")}
    settings = {name: value for name, value in settings.items() if value is not None}
    if ends := list(stop_ids(tokenizer)):
        text = json.dumps(settings | {"eos_token_id": ends}, indent=2)
        write_file(Path(directory) / _GENERATION_CONFIG, text + "\n")


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """The text of token ids, without special tokens; spaces are not cleaned up."""
    with panics_as_errors():
        text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def token_texts(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> list[str]:
    """The text that each token adds to that of those before it.

    A character that several tokens make belongs to the last of them. Joined, the texts are what ``decode`` returns, but
    for tokenizers that spell a token otherwise where more than `_CONTEXT` tokens before it are left out.
    """
    texts: list[str] = []
    done = 0  # tokens whose text is complete
    for end in range(1, len(tokens) + 1):
        first = max(0, done - _CONTEXT)
        known, text = decode(tokenizer, tokens[first:done]), decode(tokenizer, tokens[first:end])
        # Bytes that never become a character are told after as many tokens as a character can have.
        whole = not text.endswith("\ufffd") or end - done >= _CHARACTER_TOKENS or end == len(tokens)
        texts.append(text[len(known) :] if whole else "")
        done = end if whole else done
    return texts


def _is_place(name: str) -> bool:
    """Whether an argument of a tokenizer says where it is read from, which may differ between hosts."""
    return name == "name_or_path" or name.endswith(("_file", "_dir"))


def _check_files(name: str, files: Sequence[str]) -> None:
    if not set(files) & set(TOKENIZER_FILES):
        raise ConfigError(
            f"tokenizer directory {name!r} holds none of {', '.join(TOKENIZER_FILES)}. Point tokenizer at the "
            "directory that tokenizer.save_pretrained() wrote."
        )


def _check_named_files(text: bytes, file: str) -> None:
    """Refuse settings that name a file elsewhere, which transformers would read: it would come out as tokens."""
    for key, value in _parsed(text, file).items():
        if _NAMES_FILES.search(key) and key != "special_tokens_map_file":  # which is not opened
            for path in value if isinstance(value, list) and key.endswith("files") else [value]:
                if isinstance(path, str):  # a vocabulary itself is an object, merges are a list
                    check_bare_name(path, f"{key} in {file}")


def _generation_config(name: str) -> dict[str, Any]:
    """The ``generation_config.json`` beside a tokenizer; empty where there is none."""
    file = f"{name.rstrip('/')}/{_GENERATION_CONFIG}"
    if "://" in name:
        filesystem, path = url_to_fs(file)
        return _parsed(filesystem.cat_file(path), file) if filesystem.exists(path) else {}
    if Path(file).is_file():
        return _parsed(read_small(file), file)
    return _hub_generation_config(name) if name and _may_be_hub_name(name) and not Path(name).is_dir() else {}


def _parsed(text: bytes, file: str) -> dict[str, Any]:
    return parse_json(text, file, dict, "Mend it, or remove it.")


@functools.cache
def _hub_generation_config(name: str) -> dict[str, Any]:
    """The same for a name on the hub, which is asked once."""
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(name, _GENERATION_CONFIG)
        return _parsed(read_small(file), file) if file else {}
    except OSError as error:
        # The cache also remembers that the hub has no such file; only where it says nothing the answer is not known.
        if try_to_load_from_cache(name, _GENERATION_CONFIG) is None:
            log.warning(
                "%s of the tokenizer %r is neither in the cache of the Hugging Face hub nor could it be fetched (%s): "
                "answers end at the tokenizer's own end-of-sequence and end-of-turn tokens alone. Fetch it once with "
                "a network, or point tokenizer at a directory that has it.",
                _GENERATION_CONFIG,
                name,
                str(error).strip().split("\n")[0],
            )
        return {}


def _is_remote(name: str) -> bool:
    return "://" in name or _is_on_hub(name)


def _is_on_hub(name: str) -> bool:
    return bool(name) and _may_be_hub_name(name) and not Path(name).expanduser().is_dir()


def _may_be_hub_name(name: str) -> bool:
    """Whether the hub could know this name: ``model`` or ``org/model``, not a path or an address."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name


def _auto_tokenizer() -> Any:
    """The AutoTokenizer class, imported on first use and without its advice to install torch."""
    before = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        from transformers import AutoTokenizer
    finally:
        if before is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = before
    return AutoTokenizer
