"""A real browser for the tests of the page, or the reason why there is none."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
"""A browser without a display that asks nobody for anything."""


@contextlib.contextmanager
def chromium() -> Iterator[object]:
    """A browser with a user directory of its own; skips where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: scripts/setup.sh dev browser")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:  # it is a package of the system, which a test cannot install; CI does
        pytest.skip(f"none of {', '.join(NAMES)} is installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()
