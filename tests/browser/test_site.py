"""The documentation site: built without a warning, and read from a disk without a network in a real browser."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.browser import chromium

ROOT = Path(__file__).parents[2]
PAGES = ("index.html", "quickstart.html", "api.html", "configuration.html", "plan.html", "adr/index.html")

pytestmark = pytest.mark.slow


def build(config, target):
    """Build the site; with the links and anchors of all pages checked."""
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="mkdocs-material is missing: scripts/setup.sh dev docs")
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", target)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return target


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


def test_files_that_pages_name_have_pages(site):
    text = (site / "repository" / "examples" / "own_loop.py.html").read_text(encoding="utf-8")
    assert "SampleCallback" in text
    assert 'href="repository/benchmarks/index.html"' in (site / "performance.html").read_text(encoding="utf-8")


def test_pages_that_scripts_write_are_there(site):
    for page, text in {"api": "SampleCallback", "configuration": "rollout_ahead", "faults": "never returns"}.items():
        assert text in (site / f"{page}.html").read_text(encoding="utf-8")
    led = (site / "grpo.html").read_text(encoding="utf-8")
    assert 'href="configuration.html">their text</a>' in led, "a link to the section of support.md"
    titles = (ROOT / "docs" / "adr").glob("0*.md")
    index = (site / "adr" / "index.html").read_text(encoding="utf-8")
    assert not [page.name for page in titles if f'href="{page.stem}.html"' not in index]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[one](nowhere.md)", "nowhere.md"),
        ("[one](other.md#nowhere)", "nowhere"),
        ('<script src="https://example.com/x.js"></script>', "fetches from elsewhere"),
    ],
)
def test_what_is_wrong_ends_the_build(text, complaint, tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is missing: scripts/setup.sh dev docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[other](other.md#there)\n\n{text}\n")
    (tmp_path / "docs" / "other.md").write_text("# Another\n\n## There\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    settings = settings.replace("scripts/docs_site.py", str(ROOT / "scripts" / "docs_site.py"))
    settings = "\n".join(line for line in settings.splitlines() if "site.css" not in line and "polyfills" not in line)
    (tmp_path / "mkdocs.yml").write_text(settings.replace("  - offline\n", ""))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and complaint in done.stderr


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        (390, "light"),
        (1280, "dark"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in ((390, "dark"), (800, "light"), (800, "dark"), (1280, "light"))
        ),
    ],
)
def test_pages_are_read_without_a_network(site, browser, width, theme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme, offline=True)
    page, wrong = context.new_page(), []
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url)
    )
    aborted = "net::ERR_ABORTED"  # what the page before was still loading
    page.on("requestfailed", lambda request: None if request.failure == aborted else wrong.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for name in PAGES:
        page.goto((site / name).as_uri())
        scheme = page.evaluate("document.body.dataset.mdColorScheme")
        assert scheme == {"light": "default", "dark": "slate"}[theme]
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels wider than a window of {width}"
    assert not wrong
    context.close()


def test_the_search_finds_a_key(site, browser):
    page = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True).new_page()
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    page.keyboard.type("rollout_ahead")
    page.locator(".md-search-result__item a[href*='grpo.html']").first.wait_for(timeout=20_000)
