"""The served page, and logs of runs that go on."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from alasso.bench import results
from alasso.bench.registry import METHODS
from alasso.bench.report import page, watch
from alasso.bench.report.watch import Server, running
from alasso.errors import AlassoError

from report_helpers import LOG, made_up, several


@pytest.fixture
def folder(tmp_path):
    for result in several():
        results.write(result, tmp_path / "results")
    return tmp_path / "results"


def test_running_logs_of_one_method_are_told_apart(tmp_path):
    for seed in range(4):
        (tmp_path / f"permuted-digits_si_0123456789_s{seed}.csv").write_text(LOG)
    found = running(tmp_path)
    assert [one.label for one in found] == [f"SI, seed {seed}, permuted-digits 0123" for seed in range(4)]
    assert len({(one.look.light, one.look.dashes) for one in found}) == 4 and found[0].look == METHODS["si"].look


def test_logs_are_read_as_far_as_they_are_written_and_repeats_replaced(tmp_path):
    (tmp_path / "permuted-digits_si_0123456789_s2.csv").write_text(LOG)
    (tmp_path / "done.csv").write_text(LOG)
    (tmp_path / "done.json").write_text("{}")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (progress,) = running(tmp_path)
    assert progress.label == "SI, seed 2, permuted-digits 0123"
    assert progress.loss == [0.9, 0.4, 0.7]
    assert progress.penalty == [0.0, 0.0, 0.2]
    assert (progress.tasks, progress.mean_accuracy) == ([1], [0.95])


@pytest.fixture
def server(folder):
    with Server(folder, 0) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetched(address, host=None):
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def when(happened):
    """What it gives, as soon as it gives something: pages are built beside the requests."""
    for _ in range(1200):  # a busy machine takes its time
        if found := happened():
            return found
        time.sleep(0.05)
    raise AssertionError("it never happened")


def test_a_page_that_is_being_built_keeps_nobody_waiting(server, folder, monkeypatch):
    old, go_on = fetched(server.address), threading.Event()
    build = page.build
    monkeypatch.setattr(page, "build", lambda *words, **more: go_on.wait(20) and build(*words, **more))
    results.write(made_up("ewc"), folder)
    try:
        assert fetched(server.address) == fetched(server.address) == old
        assert f'data-watch="{json.loads(fetched(server.address + "state.json"))["version"]}"' in old
    finally:
        go_on.set()
    when(lambda: "EWC" in fetched(server.address))


def test_who_says_nothing_is_hung_up_on_and_does_not_keep_others_out(server, monkeypatch):
    monkeypatch.setattr(watch.Handler, "timeout", 0.3)
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(watch.MOST_CONNECTIONS + 30)]
    before = time.monotonic()
    for one in silent:
        one.settimeout(10)
        with suppress(ConnectionError):
            assert one.recv(1) == b""
        one.close()
    assert time.monotonic() - before < 8
    assert "Continual learning" in fetched(server.address)
    when(lambda: not [one for one in threading.enumerate() if "process_request" in one.name])


def test_connections_beyond_a_number_are_closed_at_once(server, monkeypatch):
    monkeypatch.setattr(watch.Handler, "timeout", 120)  # nobody is hung up on meanwhile, however busy the machine is
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(200)]
    when(lambda: sum("process_request" in one.name for one in threading.enumerate()) == watch.MOST_CONNECTIONS)
    for one in silent:
        one.close()


def test_the_server_says_in_a_header_what_the_page_may_do(server):
    with urllib.request.urlopen(server.address, timeout=20) as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';") and policy.endswith("frame-ancestors 'none'")
        assert policy.rpartition(";")[0] in answer.read().decode()


def test_the_served_page_follows_results_and_logs(server, folder):
    def state():
        return json.loads(fetched(server.address + "state.json"))

    before = state()
    assert before["live"] == []
    assert "Running" in fetched(server.address)
    log = folder / "permuted-digits_si_0123456789_s2.csv"
    log.write_text(LOG)
    begun = when(lambda: (now := state())["version"] != before["version"] and now)
    with log.open("a") as more:
        more.write(",0.3,,\n")
    assert state()["version"] == begun["version"]
    assert state()["live"][0]["loss"][-1] == 0.6
    results.write(made_up("ewc"), folder)
    when(lambda: state()["version"] != begun["version"])
    assert "EWC" in fetched(server.address)
    assert f'data-watch="{state()["version"]}"' in fetched(server.address)


def test_only_this_machine_is_answered(server):
    for path, host, status in (("nothing", None, 404), ("", "evil.example:80", 403)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(server.address + path, host)
        assert refused.value.code == status
        refused.value.close()


def test_ctrl_c_ends_the_server_cleanly(folder):
    code = (
        "import sys; from pathlib import Path; from alasso.bench.report.watch import serve\n"
        "serve(Path(sys.argv[1]), 0, lambda line: print(line, flush=True))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "http://127.0.0.1:" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            said, complaints = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, said, complaints) == (0, "stopped\n", "")


def test_a_port_in_use_is_one_clear_sentence(server, folder):
    with pytest.raises(AlassoError, match="choose another with --port"):
        Server(folder, server.server_port)
