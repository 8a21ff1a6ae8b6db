"""One HTML file that needs nothing else: template, style, script and data, which a content-security policy seals.

Everything that a model or a file says is data: it is in one JSON block, and the script shows it as text.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

SCRIPTS: Final = (
    "model.js",
    "text.js",
    "diff.js",
    "virtual_list.js",
    "chart.js",
    "state.js",
    "list.js",
    "detail.js",
    "curves.js",
    "print.js",
    "page.js",
)
"""The parts of the page's one script, in order."""
_NOT_IN_HTML: Final = re.compile(
    "[<>&\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff]"
)
"""Characters that could end the data block or mislead who reads the file's source: written as escapes."""


def render_page(payload: Mapping[str, Any], title: str) -> str:
    """Make the page.

    Args:
        payload: What `make_payload` returned.

    Returns:
        The text of an HTML file, which can be encoded as UTF-8 whatever is in it.
    """
    # Whoever imports lockstep.report to train does not wait for a template engine.
    import jinja2
    from markupsafe import Markup

    folder = resources.files(__package__) / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    parts = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
    assert "</" not in style and "</script" not in script.lower() and "<!--" not in script
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=_without_surrogates(title),
        version=importlib.metadata.version("jax-lockstep"),
        style=Markup(style),
        style_hash=_hash(style),
        script=Markup(script),
        script_hash=_hash(script),
        data=Markup(escape_json(payload)),
    )


def escape_json(value: Any) -> str:
    """JSON that can stand in an HTML ``script`` element, whatever texts are in it.

    The characters ``<``, ``>`` and ``&``, line separators, bidirectional controls, lone surrogates and what is not a
    character are written as JSON's escapes of four digits (https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements).

    Args:
        value: What JSON can express.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _NOT_IN_HTML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_page(page: str, path: Path) -> int:
    """Write the page beside its place and move it there, so that a reader never sees half of it.

    Returns:
        The number of bytes.

    Raises:
        OSError: The file cannot be written.
    """
    content = page.encode()
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return len(content)


def _hash(text: str) -> str:
    """The source expression of a policy that allows exactly this text (https://www.w3.org/TR/CSP3/#match-element-to-source-list)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _without_surrogates(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
