"""Loading a Hugging Face tokenizer: ``tokenizer.json`` as it stands, from a directory, a URL or the hub."""

import dataclasses
import functools
import importlib.metadata
import inspect
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

from lockstep.errors import ConfigError, HostTimeoutError
from lockstep.files import write_file
from lockstep.json_text import FOREIGN, not_utf8, parse_json
from lockstep.limits import TOKENIZER_BYTES, check_regular, read_object, read_small
from lockstep.printable import get_logger
from lockstep.storage import WAIT_S, call_storage
from lockstep.text.endings import ENDING_FILES, hub_generation_config, keep_ending, may_be_hub_name, parsed, read_ending
from lockstep.text.probes import check_against_file, check_against_model
from lockstep.text.template_kwargs import set_template_kwargs
from lockstep.text.tokenize import encode_text
from lockstep.urls import check_bare_name, url_to_fs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = get_logger(__name__)

TOKENIZER_JSON, TOKENIZER_MODEL = "tokenizer.json", "tokenizer.model"
TOKENIZER_FILES = (TOKENIZER_JSON, "tokenizer_config.json", TOKENIZER_MODEL, "vocab.json")
_TEKKEN = "tekken.json"  # Mistral's own format
_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""The suffixes of files that may belong to a tokenizer; weights, which may be beside it, have others."""
_WITH_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""The files whose keys are arguments of a tokenizer's class."""
_READ_WHOLE = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|config\.|generation_config)|.*\.model$"
)
"""The files that transformers and tokenizers read whole."""
_NAMES_FILES = re.compile("_(files?|dir|path|spm)$|^(vocab|merges)$")
"""Arguments that are names of files: all that tokenizers of transformers read have such names."""
_CHECKPOINT = "checkpoint"  # the folder of fetched files that has those of a checkpoint elsewhere
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(
    path: str | os.PathLike[str],
    trust_remote_code: str | None = None,
    fetched: bytes = b"",
    checkpoint: str | os.PathLike[str] = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> "PreTrainedTokenizerBase":
    """Load a tokenizer: its ``tokenizer.json`` as it stands, with the special tokens, the chat template and
    ``add_bos_token`` of ``tokenizer_config.json``.

    Where there is no such file, or code of the tokenizer's own is trusted, ``transformers.AutoTokenizer`` loads it.
    That is not asked otherwise: for some classes (``LlamaTokenizerFast``, ``GPT2Tokenizer``, …) transformers 5.12 makes
    the rules anew and leaves out those of the file.

    Args:
        path: A directory or URL with a tokenizer, or a name on the Hugging Face hub such as ``org/model``. A directory
            is read without any network access.
        trust_remote_code: The ``path`` again, where Python code that the tokenizer brings may be run, of a name on the
            hub with the commit (``org/model@COMMIT``): each host fetches it itself. None: none is run.
        fetched: What `fetch_tokenizer` returned on this host or another; empty to read what is at ``path``.
        checkpoint: The directory, URL or hub name of the model, whose files say where an answer ends (`stop_ids`);
            empty where that is ``path``.
        chat_template_kwargs: Variables for its chat template, see `set_template_kwargs`; None for none.

    Raises:
        ConfigError: There is no such directory or name, or what is there is not a tokenizer, one that names files
            elsewhere, or one with code of its own that is not trusted; or ``trust_remote_code`` names another one; or
            texts have other ids than those that ``tokenizer.json`` gives them.
    """
    name = os.fspath(path)
    if not name:
        raise ConfigError("tokenizer is empty. Set it to a tokenizer directory or a Hugging Face hub name (org/model).")
    commit, model = _commit_of_code(name, trust_remote_code), os.fspath(checkpoint) or name
    if commit is None:
        archive = fetched or fetch_tokenizer(name, None, model)
    else:  # code, and what is beside it, is nothing that another host sends
        archive = _archive(_files_at_url(name, (*_SUFFIXES, ".py"))) if "://" in name else b""
    with tempfile.TemporaryDirectory(prefix="lockstep-tokenizer-") as copy:
        if archive:
            _unpack(archive, copy, f"what process 0 fetched of the tokenizer {name!r}")
        beside = os.path.join(copy, _CHECKPOINT)
        is_copied = any(file != _CHECKPOINT for file in os.listdir(copy))
        local = copy if is_copied else name

        def place_of(text: str) -> str:
            return text.replace(beside, model).replace(copy, name)

        try:
            tokenizer = _from_place(local, (None if commit is None else "") if is_copied else commit)
            set_template_kwargs(tokenizer, chat_template_kwargs or {})
            if _is_on_hub(local) and model == name:  # `stop_ids` asks the hub
                return tokenizer
            ending = read_ending(beside, *([] if commit is None and "://" in model else [model]), local)
        except ConfigError as error:
            raise ConfigError(place_of(str(error))) from error
    if is_copied:
        tokenizer.name_or_path = name
    ending = dataclasses.replace(ending, file=place_of(ending.file), texts_file=place_of(ending.texts_file))
    keep_ending(tokenizer, ending)
    return tokenizer


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


def fetch_tokenizer(
    path: str | os.PathLike[str], trust_remote_code: str | None = None, checkpoint: str | os.PathLike[str] = ""
) -> bytes:
    """Return the files of a tokenizer at a URL or on the Hugging Face hub, and those that say where an answer ends of a
    checkpoint at a URL, for one host to ask for and all to have.

    Returns:
        The files as a zip archive; nothing for directories, which each host has itself, and for a tokenizer with code,
        which nobody sends: each host fetches it.
    """
    name, model = os.fspath(path), os.fspath(checkpoint)
    files: dict[str, bytes] = {}
    if _commit_of_code(name, trust_remote_code) is None and ("://" in name or _is_on_hub(name)):
        files = _files_at_url(name, _SUFFIXES) if "://" in name else _files_on_hub(name)
        _check_files(name, list(files))
    if "://" in model and model != name:
        endings = tuple(f"/{file}" for file in ENDING_FILES)
        beside = _files_at_url(model, endings)
        files |= {f"{_CHECKPOINT}/{file}": data for file, data in beside.items()}
    return _archive(files) if files else b""


def _archive(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for file, data in files.items():
            target.writestr(file, data)
    return archive.getvalue()


def _unpack(archive: bytes, directory: str, place: str) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as source:
            for file in source.namelist():
                target = Path(directory, *(check_bare_name(part, place) for part in file.split("/")))
                target.parent.mkdir(parents=True, exist_ok=True)
                write_file(target, source.read(file))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise ConfigError(f"{place} cannot be read ({error}). {FOREIGN}") from error


def _files_at_url(url: str, suffixes: tuple[str, ...]) -> dict[str, bytes]:
    filesystem, root = url_to_fs(url)
    try:
        listed = [path for path in filesystem.ls(root, detail=False) if path.endswith(suffixes)]
    except FileNotFoundError:
        listed = []
    return {path.rpartition("/")[2]: read_object(filesystem, path, TOKENIZER_BYTES) for path in listed}


def _files_on_hub(name: str) -> dict[str, bytes]:
    from huggingface_hub import snapshot_download

    # The directory of further chat templates is the only one that belongs to a tokenizer.
    allowed, ignored = [f"*{suffix}" for suffix in _SUFFIXES], ["*/*/*", "[!a]*/*"]

    def download() -> str:
        return snapshot_download(name, allow_patterns=allowed, ignore_patterns=ignored)

    try:
        place = Path(call_storage(f"reading the tokenizer {name!r}", download, try_s=WAIT_S))
    except (ConfigError, HostTimeoutError):
        raise
    except Exception:
        _from_place(name, None)  # says what is wrong with the name
        raise
    paths = [file for file in place.rglob("*") if file.is_file() and file.name.endswith(_SUFFIXES)]
    files = {file.relative_to(place).as_posix(): read_small(file, TOKENIZER_BYTES) for file in paths}
    if ENDING_FILES[0] not in files and (settings := hub_generation_config(name)):
        files[ENDING_FILES[0]] = json.dumps(settings).encode()
    return files


def _from_place(name: str, commit: str | None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a directory or of the hub, its own code, of a commit, where ``commit`` is not None."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        _check_files(name, [file.name for file in directory.iterdir()])
        for path in directory.iterdir():
            if _READ_WHOLE.match(path.name) and not path.is_dir():
                check_regular(path, TOKENIZER_BYTES)
        for file in _WITH_FILES:
            if (directory / file).is_file():
                _check_named_files(read_small(directory / file), f"{name}/{file}")
    elif not may_be_hub_name(name):
        raise ConfigError(
            f"tokenizer {name!r} was not found: looked for the directory {str(directory.absolute())!r}, and it does "
            "not have the form of a Hugging Face hub name (org/model). Fix the path (relative paths start at the "
            "working directory), or copy the tokenizer to a local directory."
        )
    try:
        place = str(directory) if directory.is_dir() else name
        load = functools.partial(_read, place, commit)
        return load() if directory.is_dir() else call_storage(f"reading the tokenizer {name!r}", load, try_s=WAIT_S)
    except (ConfigError, HostTimeoutError):
        raise
    except Exception as error:  # transformers raises whatever its parser or its download raised
        if directory.is_dir():
            _check_texts(name, directory)
        first_line = str(error).strip().split("\n")[0]
        where = (
            f"the directory {name!r} could not be read as a tokenizer"
            if directory.is_dir()
            else f"tokenizer {name!r} is neither a local directory nor could it be loaded from the Hugging Face hub"
        )
        fix = "Check the name, or point tokenizer at a directory that tokenizer.save_pretrained() wrote."
        if (directory / TOKENIZER_JSON).is_file():
            version = importlib.metadata.version("tokenizers")
            fix = f"Save it again, or upgrade the package tokenizers ({version}) if it is of a newer version."
        if "trust_remote_code" in str(error):
            first_line = "it brings Python code of its own, which is not run"
            at = "" if directory.is_dir() else "@COMMIT"
            fix = f"If you trust it, name it in trust_remote_code too: --trust_remote_code {name}{at}."
        raise ConfigError(f"{where} ({type(error).__name__}: {first_line}). {fix}") from error


def _check_texts(name: str, directory: Path) -> None:
    """Refuse by name the file of a tokenizer that is no JSON, or no text."""
    for path in sorted(directory.glob("*.jinja")):
        try:
            read_small(path, TOKENIZER_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}/{path.name} {not_utf8(error)}. Save it again.") from None
    for path in sorted(directory.glob("*.json")):
        if _READ_WHOLE.match(path.name):
            parse_json(
                read_small(path, TOKENIZER_BYTES).decode(errors="replace"),
                f"{name}/{path.name}",
                object,
                "Save it again.",
            )


def _read(place: str, commit: str | None) -> "PreTrainedTokenizerBase":
    transformers = _transformers()
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils.hub import cached_file

    if commit is not None:
        pinned = {"revision": commit, "code_revision": commit} if commit else {}
        return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=True, **pinned)
    settings = get_tokenizer_config(place)
    file = cached_file(place, TOKENIZER_JSON, _raise_exceptions_for_missing_entries=False)
    if file is None or "auto_map" in settings:
        # Without a word transformers asks at the terminal whether to run what is beside the tokenizer.
        made = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        pieces = cached_file(place, TOKENIZER_MODEL, _raise_exceptions_for_missing_entries=False)
        if file is None and pieces is not None:
            check_against_model(made, pieces)
        return made
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    vocab = tokenizer.get_vocab()
    for name, token in _tokens_of_class(place, settings).items():
        if name not in settings and getattr(tokenizer, name) is None and token in vocab:
            setattr(tokenizer, name, token)
    _restore_added_tokens(tokenizer, file)
    if settings.get("add_bos_token") and tokenizer.bos_token_id not in encode_text(tokenizer, "a"):
        log.warning(
            "tokenizer_config.json of %s has add_bos_token: true, and its tokenizer.json puts no %s before a text; as "
            "transformers does, the second is followed. A text that needs the token has to begin with it.",
            place,
            tokenizer.bos_token,
        )
    if str(tokenizer.chat_template).startswith("\ufeff"):
        log.warning(
            "the chat template of %s begins with a byte order mark, which is then a part of each prompt, as in "
            "transformers. Remove it, unless the model was trained with it.",
            place,
        )
    check_against_file(tokenizer, file)
    return tokenizer


def _restore_added_tokens(tokenizer: "PreTrainedTokenizerFast", file: str) -> None:
    """Give added tokens the rules of ``tokenizer.json``, such as of the space around them, where transformers has taken
    those of ``added_tokens_decoder`` in ``tokenizer_config.json``.
    """
    from tokenizers import AddedToken

    loaded = tokenizer.added_tokens_decoder
    stored = json.loads(read_small(file, TOKENIZER_BYTES)).get("added_tokens") or []
    own = {settings.pop("id"): AddedToken(**settings) for settings in stored}
    tokenizer.backend_tokenizer.add_tokens(
        [token for number, token in own.items() if repr(loaded.get(number)) != repr(token)]
    )


def _tokens_of_class(place: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that the class of a tokenizer has where its configuration names none."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    name = settings.get("tokenizer_class")
    if name is None:
        model, _ = PreTrainedConfig.get_config_dict(place, _raise_exceptions_for_missing_entries=False)
        name = model.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(model.get("model_type", ""))
    tokenizer_class = tokenizer_class_from_name(name) if name else None
    parameters = inspect.signature(tokenizer_class.__init__).parameters if tokenizer_class else {}
    defaults = {token: parameters[token].default for token in _SPECIAL_TOKENS if token in parameters}
    return {token: str(text) for token, text in defaults.items() if text and text is not inspect.Parameter.empty}


def _check_files(name: str, files: Sequence[str]) -> None:
    if _TEKKEN in files and not {TOKENIZER_JSON, TOKENIZER_MODEL} & set(files):
        raise ConfigError(
            f"{name}/{_TEKKEN} is a tokenizer in Mistral's own format, which transformers reads otherwise. Take the "
            f"{TOKENIZER_JSON} of this model, in transformers' format."
        )
    if not set(files) & set(TOKENIZER_FILES):
        raise ConfigError(
            f"tokenizer directory {name!r} holds none of {', '.join(TOKENIZER_FILES)}. Point tokenizer at the "
            "directory that tokenizer.save_pretrained() wrote."
        )


def _check_named_files(text: bytes, file: str) -> None:
    """Refuse settings that name a file elsewhere, which transformers would read: it would come out as tokens."""
    for key, value in parsed(text, file).items():
        if _NAMES_FILES.search(key) and key != "special_tokens_map_file":  # which is not opened
            for path in value if isinstance(value, list) and key.endswith("files") else [value]:
                if isinstance(path, str):  # a vocabulary itself is an object, merges are a list
                    check_bare_name(path, f"{key} in {file}")


def _is_on_hub(name: str) -> bool:
    return bool(name) and may_be_hub_name(name) and not Path(name).expanduser().is_dir()


def _transformers() -> Any:
    """The package, imported on first use and without its advice to install torch."""
    before = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = before
    return transformers
