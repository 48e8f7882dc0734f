"""What `pip install alasso` brings: the package and nothing else, the same bytes from every build, one version."""

import io
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import alasso

ROOT = Path(__file__).parent.parent
BESIDE = ["CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"]
buildapi = pytest.importorskip("flit_core.buildapi", reason="the package is built with flit_core")


@pytest.fixture
def clone(tmp_path):
    """What the build reads, as a fresh clone has it."""
    shutil.copytree(ROOT / "src", tmp_path / "clone" / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, tmp_path / "clone")
    return tmp_path / "clone"


@pytest.fixture
def built(monkeypatch):
    """Builds wheel and sdist of a folder, and returns their bytes."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1600000000")

    def build(folder):
        monkeypatch.chdir(folder)
        out = folder / "dist"
        out.mkdir()
        wheel, sdist = buildapi.build_wheel(str(out)), buildapi.build_sdist(str(out))
        return (out / wheel).read_bytes(), (out / sdist).read_bytes()

    return build


def package_files():
    """Files of the package that git does not ignore, below src."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no repository")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "alasso"]
    listed = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if (ROOT / "src" / line).exists()}


def test_wheel_and_sdist_hold_the_package_and_nothing_else(clone, built):
    wheel, sdist = built(clone)
    files = package_files()
    assert "alasso/py.typed" in files and "alasso/bench/report/assets/page.js" in files
    about = {f"alasso-{alasso.__version__}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL")}
    about |= {f"alasso-{alasso.__version__}.dist-info/{name}" for name in ("entry_points.txt", "licenses/LICENSE")}
    assert set(zipfile.ZipFile(io.BytesIO(wheel)).namelist()) == files | about
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        names = set(archive.getnames())
    folder = f"alasso-{alasso.__version__}"
    assert names == {f"{folder}/src/{file}" for file in files} | {f"{folder}/{name}" for name in (*BESIDE, "PKG-INFO")}


def test_two_builds_are_equal_and_the_sdist_builds_the_wheel(clone, built, tmp_path):
    wheel, sdist = built(clone)
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        archive.extractall(tmp_path, filter="data")
    later = tmp_path / f"alasso-{alasso.__version__}"  # its files have other times
    (later / "src" / "alasso" / "errors.py").touch()
    wheel_again, sdist_again = built(later)
    assert wheel_again == wheel
    assert sdist_again == sdist


def test_the_version_is_the_same_everywhere(clone, built):
    wheel, _ = built(clone)
    metadata = zipfile.ZipFile(io.BytesIO(wheel)).read(f"alasso-{alasso.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {alasso.__version__}\n" in metadata
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert cited[1] == alasso.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest[1] == alasso.__version__
