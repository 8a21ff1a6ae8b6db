"""A Google Cloud Storage that lives in this process: as much of its JSON API as gcsfs uses to list, read and write.

gcsfs itself runs, over HTTP, with ``STORAGE_EMULATOR_HOST``; see https://cloud.google.com/storage/docs/json_api/v1.
"""

import contextlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator


class Bucket:
    """Objects by ``bucket/name``, and what was asked for.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        self.reads: list[tuple[str, int]] = []
        """Object and bytes of each download."""
        self.refuse: str | None = None
        """What is told to everybody who asks for anything; None: nobody is refused."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which gcsfs, in any process, comes here instead of asking Google for credentials."""
        return {"STORAGE_EMULATOR_HOST": self.url, "FSSPEC_GS_TOKEN": "anon"}


@contextlib.contextmanager
def serve() -> Iterator[Bucket]:
    """The service while the context lasts."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        bucket = server.bucket = Bucket(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield bucket
        finally:
            server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind, bucket, name, query = self._asked()
        objects = self.server.bucket.objects
        if self.server.bucket.refuse is not None:
            self._answer(403, {"error": {"code": 403, "message": self.server.bucket.refuse}})
        elif not name:
            self._answer(200, _listing(objects, bucket, query))
        elif f"{bucket}/{name}" not in objects:
            self._answer(404, {"error": {"code": 404, "message": "Not Found"}})
        elif kind == "download/":
            self._send(f"{bucket}/{name}", objects[f"{bucket}/{name}"])
        else:
            self._answer(200, _resource(name, objects[f"{bucket}/{name}"]))

    def do_POST(self) -> None:
        _, bucket, _, query = self._asked()
        assert query["uploadType"] == "multipart", "longer uploads are not needed here"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        start = b"--" + re.search('boundary="?([^"]+)', self.headers["Content-Type"])[1].encode()
        _, described, content, _ = body.split(start, 3)
        name = json.loads(described.split(b"\n\n", 1)[1])["name"]
        data = content.split(b"\n\n", 1)[1].removesuffix(b"\n")
        self.server.bucket.objects[f"{bucket}/{name}"] = data
        self._answer(200, _resource(name, data))

    def _asked(self) -> tuple[str, str, str, dict[str, str]]:
        split = urllib.parse.urlsplit(self.path)
        kind, bucket, name = re.fullmatch("/(download/|upload/|)storage/v1/b/([^/]+)/o/?(.*)", split.path).groups()
        return kind, bucket, urllib.parse.unquote(name), dict(urllib.parse.parse_qsl(split.query))

    def _send(self, path: str, data: bytes) -> None:
        status = 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
            status, data = (206, data[first : last + 1]) if first < len(data) else (416, b"{}")
        self.server.bucket.reads.append((path, len(data)))
        self._answer(status, data)

    def _answer(self, status: int, body: object) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
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
