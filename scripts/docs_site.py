"""Hooks of mkdocs for the documentation site; mkdocs.yml names this file.

Pages name files of the repository that are not in docs/, as GitHub shows them. The site has a page for each, made when
it is built, so that every link can be followed without a network and there is one source of everything. The pages of
`MADE` are in no commit: scripts write them then. What the site would fetch from elsewhere ends the build.
"""

import importlib.util
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs.images import make_architecture

ROOT = Path(__file__).resolve().parents[1]
MADE = {"api.md": "make_api_docs.py", "configuration.md": "make_config_docs.py", "faults.md": "make_fault_docs.py"}
"""Pages of the site that a script writes, with the script: its `render` returns the page."""
STANDS_FOR = {"#configuration": "configuration.md", "#python-api": "api.md", "#faults": "faults.md"}
"""Sections of support.md, with the pages of `MADE` that links to them lead to on the site: elsewhere there are none."""
PLACE = "repository"
"""The folder of the site with the pages of such files."""
LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\ssrc=\"(?:https?:)?//[^\"]*|<link\b[^>]*\shref=\"(?:https?:)?//[^\"]*"
)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> None:
    """Make anchors as GitHub makes them, so that a link to a heading is right in both places; look at the pictures."""
    config.mdx_configs["toc"]["slugify"] = slug
    for name, draw in make_architecture.PICTURES.items():
        if (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") != draw():
            raise PluginError(
                f"docs/images/{name} is not what its script draws: python docs/images/make_architecture.py"
            )


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading: lower case, without punctuation, spaces as hyphens."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `MADE`, and one for each file outside docs/ that a page, also such a page, links to."""
    if Path(config.docs_dir) == ROOT / "docs":
        for uri in MADE:
            files.append(File.generated(config, uri, content=made(uri)))
    todo = [(ROOT / "docs" / file.src_uri, file.content_string) for file in files.documentation_pages()]
    for path in _named_in_nav(config.nav):
        todo.append((ROOT / "docs" / "index.md", f"[]({'../' + path})"))
    done: set[Path] = set()
    while todo:
        page, text = todo.pop()
        for target in linked(page, text):
            if target not in done:
                done.add(target)
                content = shown(target)
                uri = site_path(target)
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
                if target.suffix == ".md":
                    todo.append((target, content))
    return files


def made(uri: str) -> str:
    """The text of a page of `MADE`."""
    spec = importlib.util.spec_from_file_location(Path(MADE[uri]).stem, ROOT / "scripts" / MADE[uri])
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text: str = script.render()
    return text


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their pages."""
    here = PurePosixPath(page.file.src_uri)
    source = ROOT / (here.relative_to(PLACE) if here.parts[0] == PLACE else Path("docs") / here)
    if source.suffix == ".md" and here.parts[0] == PLACE and not source.exists():
        return markdown  # the page of a file that is not Markdown
    if page.file.src_uri == "adr/README.md":
        markdown += decisions()
    ups = "../" * (len(here.parts) - 1)

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.exists() or ROOT not in target.parents:
            return match[0]  # mkdocs says what is wrong with it
        if target == ROOT / "docs" / "support.md" and match[3][:-1] in STANDS_FOR:
            return match[1] + ups + STANDS_FOR[match[3][:-1]] + ")"
        uri = target.relative_to(ROOT / "docs").as_posix() if ROOT / "docs" in target.parents else site_path(target)
        return match[1] + ups + uri + match[3]

    return outside_code(markdown, lambda text: LINK.sub(moved, text))


def decisions() -> str:
    """A list of the pages of decisions, by their titles."""
    pages = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    titles = [page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages]
    links = [f"- [{title.replace('. ', ': ', 1)}]({page.name})" for title, page in zip(titles, pages, strict=True)]
    return "\n" + "\n".join(links) + "\n"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would fetch something from elsewhere."""
    if fetched := FETCHED.findall(output):
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {fetched}. Put the file below docs/.")
    return output


def linked(page: Path, text: str) -> list[Path]:
    """The files of the repository outside docs/ that a page links to, in the page's order."""
    found: list[Path] = []

    def look(part: str) -> str:
        for _, path, _ in LINK.findall(part):
            target = (page.parent / path).resolve()
            if target.exists() and ROOT in target.parents and ROOT / "docs" not in target.parents:
                found.append(target)
        return part

    outside_code(text, look)
    return found


def outside_code(text: str, change: Any) -> str:
    """A text with its parts outside code changed by a function."""
    parts, at = [], 0
    for match in CODE.finditer(text):
        parts += [change(text[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*parts, change(text[at:])])


def site_path(target: Path) -> str:
    """Where the site has the page of a file or folder of the repository."""
    name = target.relative_to(ROOT).as_posix()
    return f"{PLACE}/{name}" if name.endswith(".md") else f"{PLACE}/{name}.md"


def shown(target: Path) -> str:
    """The page of a file: itself where it is Markdown, else its text as a block; of a folder, the files in it."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        readme = target / "README.md"
        if readme.exists():
            return readme.read_text(encoding="utf-8")
        parts = [f"# {name}\n"]
        for file in sorted(path for path in target.rglob("*") if path.is_file() and path.suffix in LANGUAGES):
            parts.append(f"## {file.relative_to(target).as_posix()}\n\n{_block(file)}")
        return "\n".join(parts)
    return target.read_text(encoding="utf-8") if target.suffix == ".md" else f"# {name}\n\n{_block(target)}"


def _block(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    return f"````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"


def _named_in_nav(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav.removeprefix(f"{PLACE}/")] if nav.startswith(f"{PLACE}/") else []
    parts = nav.values() if isinstance(nav, dict) else nav or []
    return [path for part in parts for path in _named_in_nav(part)]
