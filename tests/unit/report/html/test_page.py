import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.report.html.page import SCRIPTS, escape_json, render_page, write_page

ROOT = Path(__file__).parents[4]
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "a\u2028b\u2029",
    "\u202egnp.exe",
    "\ud800",
    "\udc00\ud800",
    "\x00\x1b[31m",
    "𝒳😀",
    "ﾜ&amp;",
]


class Reader(HTMLParser):
    """The elements of a page, and the text of each script and style, as an HTML parser has them."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.attributes, self.inside = [], {}, {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.texts.setdefault(tag, []).append("")
        self.attributes.setdefault(tag, []).append(dict(attrs))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside][-1] += data


def test_json_in_a_page_reads_as_it_was_and_has_nothing_that_ends_it():
    value = {text: [text] for text in HOSTILE}
    text = escape_json(value)
    assert json.loads(text) == value
    assert not re.search("[<>&\u2028\u2029\u202e\ud800-\udfff\x00-\x1f]", text)
    assert "😀" in text and "ﾜ" in text
    text.encode()
    with pytest.raises(ValueError, match="Out of range"):
        escape_json(float("nan"))


def test_the_policy_allows_the_one_style_and_the_one_script_and_nothing_else():
    page = render_page({"texts": HOSTILE}, "a <b> \ud800 & title")
    found = Reader(page)
    assert found.tags.count("script") == 2 and found.tags.count("style") == 1
    data, script = found.texts["script"]
    assert json.loads(data) == {"texts": HOSTILE}
    policy = next(
        each["content"] for each in found.attributes["meta"] if each.get("http-equiv") == "Content-Security-Policy"
    )
    for kind, text in (("style-src", found.texts["style"][0]), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert found.texts["title"] == [r"a <b> \ud800 & title"] == found.texts["h1"]
    assert not re.search(
        r"""(src|href|action)\s*=|https?:|url\(|@import""", page.replace("http://www.w3.org/2000/svg", "")
    )


def test_every_part_of_the_page_is_used_and_ships():
    folder = ROOT / "src" / "lockstep" / "report" / "html" / "page"
    assert {path.name for path in folder.iterdir()} == {*SCRIPTS, "page.css", "page.html.j2"}
    assert '"lockstep.report.html" = ["page/*"]' in (ROOT / "pyproject.toml").read_text()


def test_no_part_makes_elements_of_text():
    for path in (ROOT / "src" / "lockstep" / "report" / "html" / "page").glob("*.js"):
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", text
        ), path


def test_a_page_is_replaced_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_page("né", path) == 3
    assert path.read_bytes() == "né".encode() and list(tmp_path.iterdir()) == [path]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        write_page("new", tmp_path / "folder")
    assert {each.name for each in tmp_path.iterdir()} == {"report.html", "folder"}
