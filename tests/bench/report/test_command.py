"""``alasso report``: what it writes and refuses."""

import subprocess
import sys

import pytest

from alasso.bench import results
from alasso.bench.cli import report as commands
from alasso.errors import AlassoError

from report_helpers import made_up, several


@pytest.fixture
def folder(tmp_path):
    for result in several():
        results.write(result, tmp_path / "results")
    return tmp_path / "results"


def test_the_command_writes_page_and_figures(tmp_path, capsys):
    folder = tmp_path / "two"
    for a in (1.8, 5.0):
        results.write(made_up(a=a, tasks=2), folder)
    (folder / "bad.json").write_text("{")
    commands.report([folder], output=tmp_path / "page.html", figures=tmp_path / "figures")
    said = capsys.readouterr().out
    assert "left out:" in said and "bad.json is not a whole JSON file" in said
    assert "2 results" in said and "memory is left out" in said
    assert "bad.json is not a whole JSON file" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "figures" / "sensitivity.png").exists()


def test_places_that_cannot_be_written_are_found_out_before_anything_is_written(folder, tmp_path):
    with pytest.raises(AlassoError, match="is a folder; name a file to write"):
        commands.report([folder], output=tmp_path)
    result = next(folder.glob("*.json"))
    before = result.read_bytes()
    with pytest.raises(AlassoError, match=r"has the wrong ending; name a file that ends in \.html"):
        commands.report([folder], output=result)
    assert result.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(AlassoError, match="cannot write to"):
        commands.report([folder], output=tmp_path / "page.html", figures=tmp_path / "file" / "figures")
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_results_is_one_clear_sentence(tmp_path):
    with pytest.raises(AlassoError, match="there are no results in"):
        commands.report([tmp_path], output=tmp_path / "page.html")
    with pytest.raises(AlassoError, match="--watch follows one folder"):
        commands.report([tmp_path / "nowhere"], output=tmp_path / "page.html", watch=True)
    with pytest.raises(AlassoError, match="--port is for --watch"):
        commands.report([tmp_path], output=tmp_path / "page.html", port=8000)
    with pytest.raises(AlassoError, match="follows one folder"):
        commands.report([tmp_path, tmp_path], output=tmp_path / "page.html", watch=True)


def test_a_page_needs_no_matplotlib(folder, tmp_path):
    code = (
        "import sys; from pathlib import Path; from alasso.bench.cli.report import report\n"
        "from alasso.bench.report import compare, figures, page, watch\n"
        "print([name for name in ('matplotlib', 'bokeh') if name in sys.modules])\n"
        "report([Path(sys.argv[1])], output=Path(sys.argv[2]))\n"
        "print([name for name in ('matplotlib',) if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == ("[]", "[]")
