"""A server on this machine whose replies the test gives."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

Reply = tuple[Any, ...] | Callable[[Any], tuple[Any, ...]]
"""Status, body (bytes, or an object for JSON), headers or none; or a function that makes them of the request's body."""


class Server(http.server.ThreadingHTTPServer):
    """Answers each request with the next of some replies, the last again and again."""

    daemon_threads = True

    def __init__(self, *replies: Reply) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies, self.lock = list(replies), threading.Lock()
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        """Path, headers and body of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(data) if data else None
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        status, answer, headers = (*(reply(body) if callable(reply) else reply), {})[:3]
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(*replies: Reply) -> Iterator[Server]:
    """A server while the context lasts."""
    with Server(*replies) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
