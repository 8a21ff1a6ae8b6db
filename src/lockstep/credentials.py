"""Secrets, which are not shown, logged, sent to a tracker or stored: variables by their names, and parts of URLs."""

import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.printable import printable

SECRET_NAME: Final = re.compile(r"AUTH|PASSW|TOKEN|KEY|SECRET|CREDENTIAL", re.IGNORECASE)
"""Names of variables whose values are secret wherever they come from."""
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
        return {key: hide_credentials(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [hide_credentials(each) for each in value]
    return value


def error_stack(error: BaseException) -> str:
    """The stack and the text of an error and of its causes, `without_credentials` and `printable`."""
    return printable(without_credentials("".join(traceback.format_exception(error))))


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; its lines and stacks are `without_credentials` and `printable` in whatever handler."""
    logger = logging.getLogger(name)
    if _hide_in_record not in logger.filters:
        logger.addFilter(_hide_in_record)
    return logger


def _hide_in_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(without_credentials(record.getMessage())), None
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = error_stack(record.exc_info[1]).rstrip("\n")  # handlers take this where it is set
    return True


def _shown_url(url: re.Match[str]) -> str:
    rest = url["rest"] or ""
    if rest and (url["scheme"] or _ARGUMENT.search(rest)):
        rest = HIDDEN
    return f"{url['scheme'] or ''}{url['mark']}{url['path']}{rest}"
