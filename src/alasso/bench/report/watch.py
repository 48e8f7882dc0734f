"""``alasso report --watch``: the page served on this machine alone, made anew when its files change.

Runs that go on are read from the CSV logs that ``alasso run --log csv`` writes beside its results.
"""

from __future__ import annotations

import csv
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from alasso.bench.registry import Look, label_of
from alasso.bench.report import page
from alasso.bench.report.sections import collect
from alasso.bench.report.style import look_of, plain
from alasso.bench.training.progress import CsvLog
from alasso.errors import AlassoError

HOST = "127.0.0.1"
MOST = 12  # running logs shown, the latest
MOST_OF_A_LOG = 64 << 20  # bytes
MOST_CONNECTIONS = 32  # at a time


# -- the server -----------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10  # seconds for the next byte of a request, or of an answer to be taken

    def do_GET(self) -> None:
        # A foreign page whose name is made to point here must not read results.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            return self.answer(403, "text/plain", b"only from this machine")
        if self.path == "/":
            return self.answer(200, "text/html; charset=utf-8", self.server.newest()[1])
        if self.path == "/state.json":
            return self.answer(200, "application/json", self.server.state())
        return self.answer(404, "text/plain", b"there is no such page")

    def answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", f"{page.POLICY}; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line every other second says nothing."""


class Server(ThreadingHTTPServer):
    """Serves a folder of results, and the page made from it when last asked for."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] = "", b""
        self._being_made: str | None = None  # version of the page that is being built
        self._first = threading.Event()
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise AlassoError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def version(self, live: Sequence[Progress]) -> str:
        """Changes when a result does, or when a run begins to be logged; growing logs do not change it."""
        stamps = []
        for path in sorted(self.folder.rglob("*.json")):
            with suppress(OSError):  # gone since it was listed
                stat = path.stat()
                stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
        return str(hash((tuple(stamps), tuple(progress.label for progress in live))))

    def newest(self, live: Sequence[Progress] | None = None) -> tuple[str, bytes]:
        """Version and content of the newest page. One that is due is built beside the requests, one at a time; only
        the first is waited for.
        """
        version = self.version(running(self.folder) if live is None else live)
        with self._lock:
            if self._being_made is None and self._made[0] != version:
                self._being_made = version
                threading.Thread(target=self._build, args=(version,), daemon=True).start()
        self._first.wait()
        return self._made

    def _build(self, version: str) -> None:
        content = self._made[1] or b"there is no page yet"
        try:
            with suppress(AlassoError):  # the folder is gone
                content = page.build(collect([self.folder]), running(self.folder), version=version).encode()
        finally:
            with self._lock:
                self._made, self._being_made = (version, content), None
            self._first.set()

    def state(self) -> bytes:
        """What the page asks for every other second; the version is that of the page it would get."""
        live = running(self.folder)
        return json.dumps({"version": self.newest(live)[0], "live": [asdict(progress) for progress in live]}).encode()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own; beyond so many at a time, connections are closed."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Gives the place back at the end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def serve(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serves the page of a folder until Ctrl-C.

    Args:
        folder: Where results and logs lie.
        port: On this machine; 0 for any that is free.
        say: Prints a line.

    Raises:
        AlassoError: The port is in use.
    """
    if threading.current_thread() is threading.main_thread():
        # A shell starts what it puts in the background with Ctrl-C ignored; a server must be ended somehow.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with Server(folder, port) as server:
        try:
            say(f"{server.address} shows {folder} and follows its runs; Ctrl-C ends it")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")


# -- logs of runs that go on --------------------------------------------------------------------------------------


@dataclass
class Progress:
    """One log: values by task, and by epoch counted through all tasks."""

    label: str
    look: Look = field(repr=False)
    tasks: list[float] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    mean_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    penalty: list[float] = field(default_factory=list)


def running(folder: Path) -> list[Progress]:
    """Logs that have no result beside them yet, the latest ones, in the order of their names."""
    logs = [path for path in folder.rglob("*.csv") if path.is_file() and not path.with_suffix(".json").exists()]
    latest = sorted(sorted(logs, key=lambda path: path.stat().st_mtime)[-MOST:])
    found = [(path, rows) for path in latest if (rows := read_log(path)) is not None]
    names = [method_and_label(path.stem) for path, _ in found]
    methods = [method for method, _ in names]
    # Several runs of one method each in a look of its own.
    looks = [look_of(one, None, methods[:place].count(one), methods.count(one)) for place, one in enumerate(methods)]
    return [progress_of(label, look, rows) for (_, label), look, (_, rows) in zip(names, looks, found, strict=True)]


def read_log(path: Path) -> list[Mapping[str, float]] | None:
    """Rows of a log as far as it is written, None if it is something else.

    A run that starts over or resumes appends to its log: what it does again replaces what came before.
    """
    try:
        if path.stat().st_size > MOST_OF_A_LOG:
            return None
        with path.open(newline="", encoding="utf-8") as lines:
            rows = csv.DictReader(lines)
            if tuple(rows.fieldnames or ()) != CsvLog.columns:
                return None
            parsed = [row for row in map(_numbers, rows) if row is not None]
    except (OSError, UnicodeDecodeError, csv.Error):
        return None
    kept: list[Mapping[str, float]] = []
    for row in parsed:
        while kept and _place(kept[-1]) >= _place(row):
            kept.pop()
        kept.append(row)
    return kept


def _place(row: Mapping[str, float]) -> tuple[float, float]:
    return row["task"], row.get("epoch", math.inf)  # the row of a whole task follows its epochs


def _numbers(row: Mapping[str, str | None]) -> dict[str, float] | None:
    """None for a line that is not written to its end."""
    try:
        numbers = {name: float(text) for name, text in row.items() if text}
    except (TypeError, ValueError):
        return None
    whole = {"loss", "penalty"} if "epoch" in numbers else {"learned", "mean_accuracy"}
    return numbers if {"task", *whole} <= set(numbers) and all(map(math.isfinite, numbers.values())) else None


def progress_of(label: str, look: Look, rows: Sequence[Mapping[str, float]]) -> Progress:
    """The rows' columns: those of epochs, and those of whole tasks."""
    epochs = [row for row in rows if "epoch" in row]
    tasks = [row for row in rows if "epoch" not in row]
    by_epoch = {key: [row[key] for row in epochs] for key in ("loss", "penalty")}
    by_task = {key: [row[key] for row in tasks] for key in ("learned", "mean_accuracy")}
    return Progress(label, look, [row["task"] for row in tasks], **by_task, **by_epoch)


def method_and_label(name: str) -> tuple[str, str]:
    """From a result's name, benchmark_method_hash_sSEED; any other name stands for itself.

    >>> method_and_label("permuted-digits_si_0123456789_s2")
    ('si', 'SI, seed 2, permuted-digits 0123')
    """
    parts = name.split("_")
    if len(parts) != 4 or not parts[3].startswith("s"):
        return "", plain(name)
    benchmark, method, hash_, seed = parts
    return method, plain(f"{label_of(method)}, seed {seed[1:]}, {benchmark} {hash_[:4]}")
