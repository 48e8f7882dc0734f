"""``alasso report --watch``: the page served on this machine alone, made anew when its files change."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from alasso.bench.report import page
from alasso.bench.report.live import Progress, running
from alasso.bench.report.load import collect
from alasso.errors import AlassoError

HOST = "127.0.0.1"


class Watched:
    """A folder of results, and the page made from it when last asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None

    def version(self, live: Sequence[Progress]) -> str:
        """Changes when a result does, or when a run begins to be logged; growing logs do not change it."""
        stamps = []
        for path in sorted(self.folder.rglob("*.json")):
            try:
                stat = path.stat()
            except OSError:  # gone since it was listed
                continue
            stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
        return str(hash((tuple(stamps), tuple(progress.label for progress in live))))

    def page(self) -> bytes:
        live = running(self.folder)
        version = self.version(live)
        with self._lock:
            if self._made is None or self._made[0] != version:
                self._made = (version, page.build(collect([self.folder]), live).encode())
            return self._made[1]

    def state(self) -> bytes:
        """What the page asks for every other second."""
        live = running(self.folder)
        return json.dumps({"version": self.version(live), "live": [progress.to_json() for progress in live]}).encode()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        # A foreign page whose name is made to point here must not read results.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            return self.answer(403, "text/plain", b"only from this machine")
        if self.path == "/":
            return self.answer(200, "text/html; charset=utf-8", self.server.watched.page())
        if self.path == "/state.json":
            return self.answer(200, "application/json", self.server.watched.state())
        return self.answer(404, "text/plain", b"there is no such page")

    def answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line every other second says nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.watched = Watched(folder)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise AlassoError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve(folder: Path, port: int, say: Any) -> None:
    """Until Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        # A shell starts what it puts in the background with Ctrl-C ignored; a server must be ended somehow.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with Server(folder, port) as server:
        try:
            say(f"{server.address} shows {folder} and follows its runs; Ctrl-C ends it")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")
