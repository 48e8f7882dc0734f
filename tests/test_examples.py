"""Every example runs as it stands, is short, and shows what it says."""

import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' remarks are not the point here


def main_of(name, *needed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in needed:
            pytest.importorskip(library, reason=f"{name} needs {library}")
        return runpy.run_path(str(EXAMPLES / name))["main"]


def test_own_loop():
    means = main_of("own_loop.py")()
    assert means["ALASSO"] > means["plain"] + 0.05


def test_lightning():
    means = main_of("lightning_digits.py", "lightning")()
    assert means["ALASSO"] > means["plain"] + 0.05


def test_huggingface():
    figures = main_of("huggingface_domains.py", "transformers", "accelerate")([0])
    assert figures["mean_alasso"] > figures["mean_plain"] + 0.1


def test_own_images():
    means = main_of("own_images.py")()
    assert means["alasso"] >= means["sgd"]


def test_lora():
    means = main_of("lora.py", "transformers", "peft")()
    assert means["ALASSO"] > means["plain"] + 0.05


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_fsdp2_by_torchrun_with_two_ranks_then_one(tmp_path):
    outputs = []
    for ranks in ("2", "1"):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        script = [str(EXAMPLES / "fsdp2.py"), "--folder", str(tmp_path)]
        done = subprocess.run(
            launcher + script,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(dict(re.findall(r"after (task \d, on task \d): ([\d.]+)", done.stdout)))
    assert outputs[0].keys() == {"task 1, on task 1"}
    assert outputs[1].keys() == {"task 2, on task 1", "task 2, on task 2"}
    assert float(outputs[1]["task 2, on task 1"]) > 0.7  # 0.5 without protection


def test_the_guides_figures_are_those_that_the_example_wrote():
    docs = EXAMPLES.parent / "docs"
    figures = json.loads((docs / "examples" / "huggingface_domains.json").read_text())
    guide = (docs / "guides" / "huggingface.md").read_text()
    assert len(figures["seeds"]) == len(figures["plain"]) == len(figures["alasso"]) == 5
    assert f"| plain | {figures['mean_plain']:.3f} |" in guide
    assert f"| ALASSO | {figures['mean_alasso']:.3f} |" in guide
    assert figures["mean_alasso"] >= figures["mean_plain"] + 0.1


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 80
