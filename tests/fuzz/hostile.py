"""What somebody could hand over: damaged and forged documents, and a watch over what is done while they are read."""

import contextlib
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError

SECONDS = float(os.environ.get("LOCKSTEP_FUZZ_SECONDS", "0"))
"""The seconds of all properties together (`make fuzz`); 0: the same `EXAMPLES` of each in every run."""
EXAMPLES = 30
ROUND = 300
"""Examples between two looks at the clock."""
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where files are made and removed in no time, if there is such a place."""
EXAMPLE_S = 10
"""Seconds of the processor that one example may take at most."""
WAIT_S = 120
"""Seconds by the clock on the wall that one example may take at most, on a machine that does other things too."""

DEEP, HUGE = "@deep@", "@huge@"
RAW = {f'"{DEEP}"': "[" * 60_000 + "]" * 60_000, f'"{HUGE}"': "9" * 6_000}
"""What JSON's own writer does not write, by the text that stands for it."""
PATHS = ("..", "../secret", "../secret.jsonl", "../secret.safetensors", "a/../../secret", "/", "/etc/hostname")
URLS = (
    "reference::file://../ref.json",
    "file:///etc/hostname",
    "http://127.0.0.1:9/a",
    "memory://a",
    "a::b",
    "ssh://h",
)
TEXTS = ("", "\0", "\ud800", "\x1b[2J", "é" * 400, "nan", "1e999", "float32[8,16]", "float32[", "type", DEEP, HUGE)
NUMBERS = (0, -1, 1, 2, 2**31, 2**53, 2**63, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf"), -float("inf"))
LEAVES = (
    st.sampled_from((None, True, False, *NUMBERS, *PATHS, *URLS, *TEXTS))
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
)
VALUES = (
    LEAVES
    | st.sampled_from(([], {}, [[]], [{}], {"": 1}, [0] * 999, {"type": "x"}, [None, "a"])).map(copy.deepcopy)
    | st.lists(LEAVES, max_size=3)
)


def documents(*templates: Any) -> st.SearchStrategy[bytes]:
    """JSON texts: `forged` values, and texts with damaged bytes.

    Args:
        templates: Values that are read without an error.
    """
    return forged(*templates).map(to_json) | damaged(*map(to_json, templates))


def lines(*templates: Any) -> st.SearchStrategy[bytes]:
    """Some of `documents`, a line each; the last may lack its end."""
    joined = st.lists(documents(*templates), max_size=4).map(b"\n".join)
    return st.tuples(joined, st.sampled_from((b"", b"\n", b"\r\n", b"\n\n"))).map(b"".join)


@st.composite
def forged(draw: st.DrawFn, *templates: Any) -> Any:
    """A template with up to three values replaced, left out, added or put into a list."""
    root = [copy.deepcopy(draw(st.sampled_from(templates)))]
    for _ in range(draw(st.integers(0, 3))):
        place, key = draw(st.sampled_from(list(_places(root))))
        change = draw(st.sampled_from(("replace", "replace", "leave out", "add", "wrap")))
        if change == "replace" or (place is root and change == "leave out"):
            place[key] = draw(VALUES)
        elif change == "leave out":
            del place[key]
        elif change == "wrap":
            place[key] = [place[key]]
        elif isinstance(place[key], dict):
            place[key][draw(st.sampled_from((*TEXTS, *PATHS, "digest")))] = draw(VALUES)
        elif isinstance(place[key], list):
            place[key].append(draw(VALUES))
    return root[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(inner):
        yield value, key
        yield from _places(each)


def to_json(value: Any) -> bytes:
    """A value as JSON, with what stands for `RAW` texts replaced by them."""
    text = json.dumps(value)
    for stand_in, raw in RAW.items():
        text = text.replace(stand_in, raw)
    return text.encode()


@st.composite
def damaged(draw: st.DrawFn, *texts: bytes) -> bytes:
    """A text of which up to three pieces were cut, replaced or added."""
    data = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 12)) | st.just(len(data)))
        piece = draw(st.binary(max_size=6) | st.sampled_from((b"[" * 60_000, b"\xff\xfe", b"\n", b"\0", b"../secret")))
        data = data[:begin] + piece + data[end:]
    return data


_FILES = frozenset(
    ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink")
)
_NEVER = frozenset(("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"))
_seen: list[tuple[str, str]] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and (event in _FILES or event in _NEVER):
        named = [os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes)]
        _seen.extend((event, each) for each in named or [""])


sys.addaudithook(_audit)  # there is no way to take it away again: it does nothing outside `watched`


@contextlib.contextmanager
def watched(outer: Path) -> Iterator[Path]:
    """A new directory to which the block has to keep, beside files that a name such as ``../secret`` leads to.

    Args:
        outer: An existing directory, in which it is.

    Raises:
        AssertionError: The block has opened a file beside the directory, a connection or a process.
    """
    global _seen
    beside = len(list(outer.iterdir()))
    directory = outer / f"given-{beside}"
    directory.mkdir()
    before = Path.cwd()
    os.chdir(directory)
    _seen = []
    try:
        yield directory
    finally:
        seen, _seen = _seen, None
        os.chdir(before)
    done = [(event, each) for event, each in seen if event in _NEVER or _outside(each, directory)]
    assert not done, f"done while it was read: {done}"
    assert len(list(outer.iterdir())) == beside + 1, "something was made beside the directory"


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A context inside that of `watched` for what only names a place beside the directory, as a link to it does."""
    global _seen
    seen, _seen = _seen, None
    try:
        yield
    finally:
        _seen = seen


def with_secrets(outer: Path) -> Path:
    """A directory with the files that the paths of `PATHS` lead to from one inside it."""
    for path in PATHS[1:4]:
        (outer / Path(path).name).write_bytes(b"{}")
    return outer


def _outside(path: str, directory: Path) -> bool:
    """Whether a path is beside a directory: in the one that it is in, or a file of the system that was named."""
    whole = os.path.realpath(os.path.join(directory, path)) if "\0" not in path else "/"
    return whole == "/etc/hostname" or (
        f"{whole}/".startswith(f"{directory.parent}/") and not f"{whole}/".startswith(f"{directory}/")
    )


_properties: list[str] = []


def fuzz(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., object]], Callable[[], None]]:
    """A test that reads examples in a directory of their own. Whatever it raises that is not ours fails it.

    Args:
        strategies: What the examples are drawn from; the function takes the directory, then one value of each.
    """

    def decorate(read: Callable[..., object]) -> Callable[[], None]:
        _properties.append(read.__name__)

        def test() -> None:
            begin, number, accepted, count, slowest = time.monotonic(), 0, 0, 0, 0.0
            outer = Path()

            def timed(values: Any) -> None:
                nonlocal accepted, count, slowest
                count, start, waited = count + 1, time.process_time(), time.monotonic()
                with watched(outer) as directory, contextlib.suppress(LockstepError):
                    read(directory, *values)
                    accepted += 1
                took = time.process_time() - start
                slowest = max(slowest, took)
                assert took < EXAMPLE_S, f"it took {took:.1f} s of the processor"
                assert time.monotonic() - waited < WAIT_S, "it waits for something"

            while number == 0 or time.monotonic() - begin < SECONDS / len(_properties):
                run = settings(
                    max_examples=ROUND if SECONDS else EXAMPLES,
                    deadline=None,  # by the clock on the wall, which runs on while other programs have the processor
                    database=None,
                    derandomize=not SECONDS,
                    report_multiple_bugs=False,
                    suppress_health_check=list(HealthCheck),
                    phases=(Phase.generate, Phase.shrink),
                )(given(st.tuples(*strategies))(timed))
                with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
                    outer = with_secrets(Path(name).resolve())
                    (seed(f"{os.getpid()} {number}")(run) if SECONDS else run)()
                number += 1
            assert accepted, "every example was refused: they say little"
            if SECONDS:
                seconds = time.monotonic() - begin
                text = (
                    f"{read.__name__}: {count:,} examples in {seconds:.0f} s, {accepted:,} read; slowest {slowest:.2f}"
                )
                print(f"\n{text}", flush=True)

        test.__name__ = test.__qualname__ = read.__name__
        test.__doc__, test.__module__ = read.__doc__, read.__module__
        return test

    return decorate
