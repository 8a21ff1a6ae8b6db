"""Attacks of the second review, made up anew: links, names, headers of servers and of packed files that lie."""

import contextlib
import gzip
import io
import os
import re
import resource
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from hypothesis import strategies as st

from lockstep import urls
from lockstep.errors import ConfigError
from lockstep.files import in_place, write_file
from lockstep.printable import printable, visible
from lockstep.report import Tail, drop_later, find_run, make_payload, render_page
from lockstep.training.checkpoints.checkpoint import CheckpointDirectory
from lockstep.training.data.records import list_files, read_piece
from lockstep.urls import check_bare_name, check_links, read_http
from tests.fuzz.hostile import PATHS, TEXTS, damaged, fuzz, to_json, unwatched

FILES = (
    "samples.jsonl",
    "metrics.jsonl",
    "checkpoints/step-1/metadata.json",
    "cache/chunk-00000.json",
    "wandb-run.json",
)
FOLDERS = ("checkpoints", "checkpoints/step-1", "checkpoints/step-2", "cache", "wandb")
TARGETS = ("../secret", "..", ".", "/etc", "nowhere", "samples.jsonl", "checkpoints", "loop")
ENTRIES = st.dictionaries(
    st.sampled_from((*FOLDERS, *FILES, "loop")),
    st.tuples(st.sampled_from(("symlink", "symlink", "link", "pipe", "file")), st.sampled_from(TARGETS)),
    max_size=5,
)


def make_tree(directory: Path, entries: dict[str, tuple[str, str]]) -> None:
    """Make links, hard links, pipes and files below a directory, in the order of their depth."""
    for name, (kind, target) in sorted(entries.items()):
        path = directory / name
        with contextlib.suppress(OSError):  # its parent is a file, a pipe, or a link to nothing
            if os.path.realpath(path.parent).startswith(str(directory)):
                path.parent.mkdir(parents=True, exist_ok=True)
                if kind == "symlink":
                    path.symlink_to(target)
                elif kind == "link":
                    path.hardlink_to(
                        directory / FILES[0]
                    )  # one to a file elsewhere is written through: docs/security.md
                elif kind == "pipe":
                    os.mkfifo(path)
                else:
                    path.write_text('{"step": 9}\n')


@fuzz(ENTRIES, st.booleans())
def test_a_directory_of_links_is_written_to(directory, entries, checked):
    """As whoever resumes a run does; nothing beside the directory is changed, made or removed."""
    with unwatched():
        make_tree(directory, entries)
        try:
            write_into(checked)
        finally:
            beside = sorted(directory.parent.glob("secret*"))
            assert [path.read_bytes() for path in beside] == [b"{}"] * 3, "it wrote through a link"


def write_into(checked: bool) -> None:
    """Write to this directory: after its links were looked at, or without."""
    if checked:
        check_links(".")
        for name in FILES[:2]:
            with contextlib.suppress(OSError):
                drop_later(name, 3)
        checkpoints = CheckpointDirectory("checkpoints")
        with contextlib.suppress(OSError):
            for step in {*checkpoints.steps(), *checkpoints.unfinished()}:
                checkpoints.discard(step)
    for name in FILES if checked else FILES[:2]:  # folders that are links are what `check_links` is for
        with contextlib.suppress(OSError), open(name, "ab", opener=in_place) as file:
            file.write(b"{}\n")
        with contextlib.suppress(OSError):
            write_file(name, b"[]")


NAMES = st.sampled_from(
    (
        *PATHS,
        *TEXTS[:5],
        "\x9b2J",
        "\u202e",
        "<script>",
        "[red]x[/red]",
        "a" * 300,
        "a\nb",
        "\r",
        "\udcff",
        "&#27;",
        "`a`",
    )
) | st.text(max_size=6)
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@fuzz(NAMES, NAMES)
def test_names(directory, name, metric):
    """Names of files, metrics and columns are text on the terminal and in the page of a run."""
    assert not UNSEEN.search(visible(name) + printable(metric).replace("\n", ""))
    with contextlib.suppress(ConfigError):
        place = directory / check_bare_name(name, "a")
        assert place.parent == directory and place.name == name
    row = {"step": 1, "prompt_id": 0, "generation_id": 0, "prompt": name, "generated_text": metric, metric: 1.0}
    for file, values in (("samples.jsonl", row), ("metrics.jsonl", {"step": 1, "time": 2.0, metric: 0.5, name: name})):
        (directory / file).write_bytes(to_json(values) + b"\n")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print(Tail(".").look(at_end=True))
    page = render_page(make_payload([find_run(".")]), name)
    assert not UNSEEN.search(shown.getvalue()) and "<script>a" not in page


OK = b"HTTP/1.1 200 OK\r\n"
HEADS = (
    *(OK, OK + b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1 301 Moved\r\nLocation: file:///etc/hostname\r\n"),
    *(
        b"HTTP/1.1 503 No\r\n",
        b"HTTP/9.9 abc\r\n",
        b"ICY 200\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 99,
        b"\xff\0",
        b"",
    ),
)
LENGTHS = tuple(b"Content-Length: " + number + b"\r\n" for number in (b"2", b"-1", b"9" * 5000, b"2, 3", b""))
FIELDS = (
    *(*LENGTHS, b"A: b\r\n" * 101, b"A" * 70_000, b": \r\n", b" folded\r\n", b"Content-Encoding: gzip\r\n", b"\r\n"),
    b"\xff: \xfe\r\n",
)
CHUNKS = (b"4\r\nabcd\r\n0\r\n\r\n", b"ffffffffffffffff\r\na", b"-1\r\n", b"0\r\n" + b"A: b\r\n" * 99)
BODIES = st.sampled_from((b"", b"{}", b"{} more", *CHUNKS, b"x" * 2_000_000))
ENDS = st.sampled_from((False, False, False, True))


@fuzz(st.sampled_from(HEADS), st.lists(st.sampled_from(FIELDS), max_size=3).map(b"".join), BODIES, st.booleans(), ENDS)
def test_reply_of_a_server(directory, head, fields, body, separated, stays_open):
    """What ends the wait is the reply, its end, or the total time."""
    ours, theirs = socket.socketpair()

    def serve():
        with contextlib.suppress(OSError):
            theirs.sendall(head + fields + b"\r\n" * separated + body)
        if not stays_open:
            with contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(urls.socket, "create_connection", lambda *args: ours)
        thread.start()
        try:
            with contextlib.suppress(OSError):  # of the connection, of the time, and of HTTP
                assert len(read_http(urllib.request.Request("http://h/a"), 0.2)) <= urls.REPLY_BYTES
        finally:
            ours.close(), theirs.close()
            thread.join()


def packed_rows():
    """A file of each packed kind with three rows, by name."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'jax-lockstep[parquet]')")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["a", "bb", "a"], "ids": [[1], [], [2, 3]]})
    files = {"a.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 3)}
    for number, options in enumerate(({}, {"compression": "zstd"}, {"compression": "none", "use_dictionary": False})):
        data = io.BytesIO()
        pq.write_table(table, data, **options)
        files[f"{number}.parquet"] = data.getvalue()
    for name, make in (("a.arrow", pa.ipc.new_file), ("b.arrow", pa.ipc.new_stream)):
        data = io.BytesIO()
        with make(data, table.schema) as writer:
            writer.write_table(table)
        files[name] = data.getvalue()
    return files


PACKED = packed_rows()
LIES = (
    b"\xff" * 4,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"\xfe\xff\xff\xff\x0f",
    bytes(4),
    b"\x80\x80\x80\x80\x08",
    b"\x01\0\0\x40",
)
GROWTH = 2 << 30
"""Bytes by which this process may have grown by what a file of a few hundred bytes says."""


@st.composite
def lying(draw, data):
    """A file with up to three numbers overwritten, or damaged."""
    for _ in range(draw(st.integers(0, 3))):
        at, lie = draw(st.integers(0, len(data))), draw(st.sampled_from(LIES))
        data = data[:at] + lie + data[at + len(lie) :]
    return data


@fuzz(
    st.sampled_from(sorted(PACKED)).flatmap(
        lambda name: st.tuples(st.just(name), lying(PACKED[name]) | damaged(PACKED[name]))
    )
)
def test_packed_rows(directory, example):
    """Headers of gzip, Parquet and Arrow whose sizes lie."""
    name, data = example
    (directory / name).write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for file in list_files(name, "data.train_urls"):
        for _, _, _ in read_piece(file, 0, 1, ("text",), max_line_bytes=100_000):
            pass
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < GROWTH
