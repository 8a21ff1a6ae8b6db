"""A Google Cloud Storage that lives in this process: as much of its JSON API as gcsfs and tensorstore use here.

Both run themselves, over HTTP; see https://cloud.google.com/storage/docs/json_api/v1.
"""

import collections
import contextlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

import fsspec
import pytest


class Bucket:
    """Objects by ``bucket/name``, and what was asked for.

    Args:
        url: The URL of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        self.generations: collections.Counter[str] = collections.Counter()
        """How often each object was written, which tensorstore asks for before it overwrites one."""
        self.reads: list[tuple[str, int]] = []
        """Object and bytes of each download."""
        self.refuse: str | None = None
        """What is told to everybody who asks for anything; None: nobody is refused."""
        self.answering = threading.Event()
        """Cleared, requests are taken and nobody is answered, as by a server that is stopped (SIGSTOP). A request for
        ``/stop`` clears it, one for ``/go`` sets it."""
        self.answering.set()
        self._downloads_left: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which both, in any process, come here instead of asking Google for credentials."""
        own = {"TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none"}
        return {"STORAGE_EMULATOR_HOST": self.url, "FSSPEC_GS_TOKEN": "anon", **own}

    def stop_after(self, downloads: int) -> None:
        """Answer so many downloads more, and nothing after them."""
        self._downloads_left = downloads
        if not downloads:
            self.answering.clear()

    def note_read(self, path: str, size: int) -> None:
        """Remember a download that is about to be answered."""
        self.reads.append((path, size))
        if self._downloads_left:
            self.stop_after(self._downloads_left - 1)

    def write(self, path: str, data: bytes) -> None:
        """Store an object."""
        self.generations[path] += 1
        self.objects[path] = data


@contextlib.contextmanager
def serve() -> Iterator[Bucket]:
    """The service while the context lasts; the test is skipped where gcsfs is missing."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed (pip install 'jax-lockstep[gcs]')")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        bucket = server.bucket = Bucket(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield bucket
        finally:
            bucket.answering.set()
            server.shutdown()


@contextlib.contextmanager
def serve_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The service while the context lasts, which this process reaches too."""
    with serve() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        fsspec.filesystem("gs").clear_instance_cache()
        yield bucket
        bucket.answering.set()
        fsspec.filesystem("gs").clear_instance_cache()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path in ("/stop", "/go"):
            answering = self.server.bucket.answering
            answering.clear() if self.path == "/stop" else answering.set()
            self._answer(200, b"")
            return
        kind, bucket, name, query = self._asked()
        objects = self.server.bucket.objects
        if self.server.bucket.refuse is not None:
            self._answer(403, {"error": {"code": 403, "message": self.server.bucket.refuse}})
        elif not name:
            self._answer(200, _listing(objects, bucket, query))
        elif f"{bucket}/{name}" not in objects:
            self._answer(404, {"error": {"code": 404, "message": "Not Found"}})
        elif kind == "download/" or query.get("alt") == "media":
            self._send(f"{bucket}/{name}", objects[f"{bucket}/{name}"])
        else:
            self._answer(200, _resource(name, objects[f"{bucket}/{name}"]))

    def do_POST(self) -> None:
        _, bucket, uploaded, query = self._asked()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if uploaded:  # the address that a resumable upload was given
            assert self.headers.get("Content-Range", "bytes 0-").startswith(("bytes 0-", "bytes */")), "one part only"
            self.server.bucket.write(f"{bucket}/{uploaded}", body)
            self._answer(200, _resource(uploaded, body))
            return
        if query["uploadType"] == "media":
            self._overwrite(bucket, query, body)
            return
        if query["uploadType"] == "resumable":
            name = urllib.parse.quote(json.loads(body)["name"], safe="")
            self._answer(200, b"", {"Location": f"{self.server.bucket.url}/upload/storage/v1/b/{bucket}/o/{name}"})
            return
        assert query["uploadType"] == "multipart"
        start = b"--" + re.search('boundary="?([^"]+)', self.headers["Content-Type"])[1].encode()
        _, described, content, _ = body.split(start, 3)
        name = json.loads(described.split(b"\n\n", 1)[1])["name"]
        data = content.split(b"\n\n", 1)[1].removesuffix(b"\n")
        self._overwrite(bucket, query | {"name": name}, data)

    def do_DELETE(self) -> None:
        _, bucket, name, _ = self._asked()
        found = self.server.bucket.objects.pop(f"{bucket}/{name}", None)
        self._answer(204 if found is not None else 404, b"")

    def _overwrite(self, bucket: str, query: dict[str, str], data: bytes) -> None:
        path, store = f"{bucket}/{query['name']}", self.server.bucket
        now = store.generations[path] if path in store.objects else 0
        if int(query.get("ifGenerationMatch", now)) != now:
            self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            return
        store.write(path, data)
        self._answer(200, _resource(query["name"], data) | {"generation": str(store.generations[path])})

    def _asked(self) -> tuple[str, str, str, dict[str, str]]:
        self.server.bucket.answering.wait()
        split = urllib.parse.urlsplit(self.path)
        kind, bucket, name = re.fullmatch("/(download/|upload/|)storage/v1/b/([^/]+)/o/?(.*)", split.path).groups()
        return kind, bucket, urllib.parse.unquote(name), dict(urllib.parse.parse_qsl(split.query))

    def _send(self, path: str, data: bytes) -> None:
        status, headers = 200, {"x-goog-generation": str(self.server.bucket.generations[path])}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
            size = len(data)
            status, data = (206, data[first : last + 1]) if first < size else (416, b"{}")
            headers["Content-Range"] = f"bytes {first}-{first + len(data) - 1}/{size}"
        self.server.bucket.note_read(path, len(data))
        self._answer(status, data, headers)

    def _answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def _resource(name: str, data: bytes) -> dict[str, str]:
    return {"kind": "storage#object", "name": name, "size": str(len(data)), "generation": "1"}


def _listing(objects: dict[str, bytes], bucket: str, query: dict[str, str]) -> dict[str, object]:
    """Objects below a prefix, those behind the next delimiter as one prefix, as the service gives them."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    items, prefixes = [], set()
    for path in sorted(objects):
        name = path.removeprefix(f"{bucket}/")
        if not path.startswith(f"{bucket}/{prefix}"):
            continue
        inner, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        if found:
            prefixes.add(prefix + inner + delimiter)
        else:
            items.append(_resource(name, objects[path]))
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}
