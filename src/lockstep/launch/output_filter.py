"""A filter that takes the values of secret variables out of what a program prints: ``python3 filter.py NAME ...``.

It runs as a script beside ``redact.py``, where no package is installed, with Python 3.8 or newer.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys


def main(names: list[str]) -> None:
    """Copy standard input to standard output without the values of some variables of the environment."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the program's last words come after such a signal
    redactor = importlib.import_module("redact").Redactor([os.environ[name] for name in names if name in os.environ])
    while True:
        data = os.read(0, 1 << 16)
        out = redactor.feed(data) if data else redactor.flush()
        while out:
            out = out[os.write(1, out) :]
        if not data:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
