"""Looks at every outside link of the documentation: ``make links``, and each week .github/workflows/site.yml.

It is no part of ``make test``, which needs no network. A server that refuses or is busy (403, 429, 5xx) is printed and
is no failure; a page that is not there, or a host that has no address, is. Exit code 2: no link answers, so there is no
network here. Standard library only.
"""

import concurrent.futures
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "infra/*.md", "data/**/*.md", "src/**/*.py", "scripts/*.py")
LINK = re.compile(r"https?://[^\s\"'`<>)\]\\{}…]+")
GONE = (404, 410)
TIMEOUT_S = 20.0


def links(root: Path) -> dict[str, list[str]]:
    """Every outside link below a directory, with the files that have it; those of examples are left out."""
    files: dict[str, list[str]] = {}
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)}):
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            url = link.rstrip(".,;:*").partition("#")[0]
            if not re.match(r"https?://(127\.|x\.org|[\w.-]*example\b)", url) and "." in url.split("/")[2]:
                files.setdefault(url, []).append(path.relative_to(root).as_posix())
    return files


def fault(url: str) -> tuple[bool, str]:
    """Whether a link is dead, and what its server says; two empty values where all is well."""
    text = ""
    for method in ("HEAD", "GET"):  # some servers answer the second alone
        request = urllib.request.Request(url, method=method, headers={"User-Agent": "Mozilla/5.0 (link check)"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return False, ""
        except urllib.error.HTTPError as error:
            dead, text = error.code in GONE, f"{error.code} {error.reason}"
        except (OSError, ValueError) as error:
            dead, text = "Name or service not known" in str(error), str(error)
    return dead, text


def faults(urls: Iterable[str]) -> dict[str, tuple[bool, str]]:
    """The links that are not well, by their URL, as `fault` says it."""
    urls = sorted(urls)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return {url: (dead, text) for url, (dead, text) in zip(urls, pool.map(fault, urls), strict=True) if text}


def main(root: Path = ROOT) -> int:
    """Print what is wrong; 1 where a link is dead, 2 where none answers."""
    files = links(root)
    found = faults(files)
    if files and len(found) == len(files):
        print(f"none of {len(files)} links answers: {next(iter(found.values()))[1]}. This needs a network.")
        return 2
    for url, (dead, text) in found.items():
        print(f"{'dead' if dead else 'not known'}: {url}: {text} ({', '.join(files[url])})")
    print(f"{len(files)} links, {sum(dead for dead, _ in found.values())} dead")
    return int(any(dead for dead, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
