"""Catalog entries of small stand-ins, and a site on the loopback."""

import http.server
import threading
from dataclasses import replace

import pytest

from alasso.bench.data import DataFile
from alasso.bench.data.datasets import CATALOG

from data_helpers import HALVES, IDX_FILES, Site, data_file, sha256


@pytest.fixture
def small_mnist(monkeypatch):
    files = [data_file(name, content) for name, content in IDX_FILES.items()]
    entry = replace(
        CATALOG["mnist"], shape=(1, 4, 4), train_files=tuple(files[:2]), test_files=tuple(files[2:]), addresses=()
    )
    monkeypatch.setitem(CATALOG, "mnist", entry)


@pytest.fixture
def small_cifar100(monkeypatch):
    train, test = (
        (DataFile(name, {edition: sha256(HALVES[edition, name]) for edition in ("official", "re-split")}),)
        for name in ("train.bin", "test.bin")
    )
    entry = replace(CATALOG["cifar100"], shape=(3, 2, 2), train_files=train, test_files=test)
    monkeypatch.setitem(CATALOG, "cifar100", entry)


@pytest.fixture
def small_tiny(monkeypatch):
    entry = replace(CATALOG["tiny-imagenet"], shape=(3, 8, 8), class_count=2, train_per_class=3, test_per_class=1)
    monkeypatch.setitem(CATALOG, "tiny-imagenet", entry)


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    served = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served.asked.append(self.path)
            content = served.pages.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: served.break_after.pop(self.path, len(content))])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()
