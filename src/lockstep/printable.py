"""Texts for people: in their units, without control characters, which a terminal obeys, and without secrets.

Secrets are not shown, logged, sent to a tracker or stored: variables by their names, and parts of URLs.
"""

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

from lockstep.errors import message_of
from lockstep.files import advice_of
from lockstep.redact import Redactor

ERROR_CHARACTERS: Final = 2000  # the longest text of an error that is stored, or travels to other processes
VISIBLE_CONTROLS: Final = {"\n": "↵", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """A text on one line, with a sign for each newline, tab and control character, without the spaces around it."""
    return _escaped("".join(VISIBLE_CONTROLS.get(character, character) for character in text.strip(" ")))


def printable(text: str) -> str:
    """A text with its line ends, and an escape for every other character that cannot be printed."""
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(text: str) -> str:
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def bytes_text(size: int) -> str:
    """Bytes for reading."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def seconds_text(value: float) -> str:
    """Seconds for reading, in the unit that they fill."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return "0" if value == 0 else f"{value * 1e6:.2g} µs"


# Each character is looked at once: a text of others must not take time that grows with the square of its length.
_URL: Final = re.compile(
    r"""(?P<scheme>https?)?(?P<mark>:(?:\\?/){2})(?:[^/\s"'<>?#]*@)?(?P<path>[^\s?#"'<>]*)(?P<rest>[?#][^\s"'<>]*)?""",
    re.IGNORECASE,
)
_ARGUMENT: Final = re.compile("[=@]|://")
HIDDEN: Final = "?…"


def without_credentials(text: str) -> str:
    """A text whose URLs have no user, no password and no query: signed URLs and tokens are there.

    Where the protocol is not HTTP, a ``?`` or ``#`` with no ``=`` after it belongs to the path and stays.
    """
    return _URL.sub(_shown_url, text)


def hide_credentials(value: Any) -> Any:
    """JSON values with `without_credentials` of every text in them."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {key: hide_credentials(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [hide_credentials(inner) for inner in value]
    return value


SECRET_OPTION: Final = re.compile("(PASSW\\w*|SECRET\\w*|CREDENTIAL\\w*|KEY|TOKEN|AUTH)$", re.IGNORECASE)
"""Names of options whose values are secret: ``--tokenizer`` is none of them."""


def public_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line `without_credentials`, and without the values of options with the name of a secret."""
    shown, secret = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("--") and SECRET_OPTION.search(name):
            shown.append(f"{name}={HIDDEN[1:]}" if equals else name)
            secret = not equals
        else:
            shown.append(HIDDEN[1:] if secret and not argument.startswith("--") else without_credentials(argument))
            secret = False
    return shown


def without_secrets(text: str) -> str:
    """A text `without_credentials`, and without the values of variables of this process with the name of a secret.

    A variable that names a file has no secret as its value.
    """
    values = {os.environ.get(name, "") for name in list(os.environ) if SECRET_OPTION.search(name)}
    secrets = [value for value in values if not _is_path(value)]
    return without_credentials(Redactor(secrets).text(text) if secrets else text)


_SOURCES: Final = re.compile(r" *\[source locations='[^']*'\]")  # the lines of TensorStore's code


def error_line(error: BaseException, advice: str = "") -> str:
    """The last line of a command that fails, `without_secrets`; advice is a sentence after the error's own."""
    return f"error: {printable(without_secrets(message_of(error) + (f'. {advice}' if advice else '')))}"


def error_text(error: BaseException, length: int = ERROR_CHARACTERS) -> str:
    """The class and the text of an error, `without_secrets`, cut after that: half of a secret would stay.

    Args:
        length: Its characters at most.
    """
    text = without_secrets(": ".join(filter(None, (type(error).__name__, _SOURCES.sub("", message_of(error))))))
    return text if len(text) <= length else text[: length - 3] + "..."


def error_stack(error: BaseException) -> str:
    """The stack and the text of an error and of its causes, `without_secrets` and `printable`."""
    return printable(without_secrets("".join(traceback.format_exception(error))))


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; its lines and stacks are `without_secrets` and `printable` in whatever handler."""
    logger = logging.getLogger(name)
    if _hide_in_record not in logger.filters:
        logger.addFilter(_hide_in_record)
    return logger


def write_to_stdout(write: Callable[[], object]) -> None:
    """Have something written to stdout, where nothing that it cannot take ends the program.

    A character that its encoding does not have is escaped. Where it cannot be written to (a closed terminal, a full
    disk, a pipe that nobody reads), the log says so, and what follows is lost.
    """
    try:
        try:
            write()
            sys.stdout.flush()
        except UnicodeEncodeError:
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
            write()
            sys.stdout.flush()
    except (OSError, ValueError, AttributeError, SystemExit) as error:
        # rich makes SystemExit of a broken pipe.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        cause = error.__context__ if isinstance(error, SystemExit) else error
        get_logger(__name__).warning("stdout cannot be written to, nothing more is shown there: %s", cause)
        # The buffer still has what could not be written, and Python's exit would fail for it.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        with contextlib.suppress(OSError, ValueError):
            os.dup2(sys.stdout.fileno(), 1)


def print_lines(*lines: object) -> None:
    """Print lines by `write_to_stdout`; names of files and of others in them are made `printable`."""
    write_to_stdout(lambda: print(*(printable(str(line)) for line in lines), sep="\n"))


def print_to_stderr(text: str = "", *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print a text to stderr, or to another stream; where it cannot be written nobody can be told, and nothing ends."""
    with contextlib.suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr if stream is None else stream, flush=True)


def show_log(level: int) -> None:
    """Show the package's log on stderr, from a level on: what a command calls, and no library.

    The handler is the package's own, and the root logger, which any import may configure, has no part in it: nothing
    that others set hides a line or repeats it.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    package = logging.getLogger(__package__)
    package.handlers, package.propagate = [handler], False
    package.setLevel(level)
    get_logger("absl")  # orbax logs the stack of a save that fails; `Checkpointer` says so in a line


@contextlib.contextmanager
def keep_root_logger() -> Iterator[None]:
    """Undo what an import does to the root logger: with a handler there, the user's ``basicConfig`` has no effect."""
    root = logging.root
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _is_path(value: str) -> bool:
    """Whether a value is a path, of a file in a directory that is there."""
    return os.path.dirname(value) not in ("", "/") and os.path.isdir(os.path.dirname(value))


def _hide_in_record(record: logging.LogRecord) -> bool:
    try:
        text = record.getMessage()
    except Exception:  # a value that fails to make its text, such as a user's error
        values = record.args if isinstance(record.args, tuple) else ()
        record.args = tuple(message_of(value) if isinstance(value, BaseException) else value for value in values)
        text = record.getMessage()
    record.msg, record.args = printable(without_secrets(text)), None
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        text = error_text(error) if advice_of(error) else error_stack(error)
        record.exc_text = printable(text).rstrip("\n")  # handlers take this where it is set
    return True


def _shown_url(url: re.Match[str]) -> str:
    rest = url["rest"] or ""
    if rest and (url["scheme"] or _ARGUMENT.search(rest)):
        rest = HIDDEN
    return f"{url['scheme'] or ''}{url['mark']}{url['path']}{rest}"
