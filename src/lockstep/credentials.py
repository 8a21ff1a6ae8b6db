"""What is not shown, logged, sent to a tracker or stored: variables by their names, and parts of URLs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

SECRET_NAME: Final = re.compile(r"AUTH|PASSW|TOKEN|KEY|SECRET|CREDENTIAL", re.IGNORECASE)
"""Names of variables whose values are secret wherever they come from."""
_URL: Final = re.compile(r"""([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/\s@"'<>]*@)?([^\s?"'<>]*)(\?[^\s"'<>]*=[^\s"'<>]*)?""")
HIDDEN: Final = "?…"


def without_credentials(text: str) -> str:
    """A text whose URLs have no user, no password and no query: signed URLs and tokens are there.

    A ``?`` with no ``=`` after it is a wildcard and stays.
    """
    return _URL.sub(lambda url: f"{url[1]}{url[2]}{HIDDEN if url[3] else ''}", text)


def hide_credentials(value: Any) -> Any:
    """JSON values with `without_credentials` of every text in them."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {key: hide_credentials(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [hide_credentials(each) for each in value]
    return value
