"""The served page, and logs of runs that go on."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from alasso.bench import results
from alasso.bench.registry import METHODS
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


def test_the_served_page_follows_results_and_logs(server, folder):
    def state():
        return json.loads(fetched(server.address + "state.json"))

    before = state()
    assert before["live"] == []
    assert "Running" in fetched(server.address)
    log = folder / "permuted-digits_si_0123456789_s2.csv"
    log.write_text(LOG)
    begun = state()
    assert begun["version"] != before["version"]
    with log.open("a") as more:
        more.write(",0.3,,\n")
    assert state()["version"] == begun["version"]
    assert state()["live"][0]["loss"][-1] == 0.6
    results.write(made_up("ewc"), folder)
    assert state()["version"] != begun["version"]
    assert "EWC" in fetched(server.address)


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
