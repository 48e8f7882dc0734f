"""The code in the guides runs as it is printed."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

GUIDES = Path(__file__).parent.parent / "docs" / "guides"
NEEDS = {
    "benchmarks": [],
    "lightning": ["lightning"],
    "huggingface": ["transformers", "accelerate"],
    "lora": ["peft"],
    "language_models": ["transformers", "accelerate", "trl"],
    "gauge": [],
    "streams": [],
    "distributed": [],
}
pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' remarks are not the point here


@pytest.fixture
def a_group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("guide", NEEDS)
def test_code_of_a_guide(guide, tmp_path, monkeypatch, request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in NEEDS[guide]:
            pytest.importorskip(library, reason=f"the guide {guide} needs {library}")
    if guide == "distributed":
        request.getfixturevalue("a_group_of_one")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / f"{guide}.md").read_text(), re.S)
    assert blocks
    exec(compile("\n".join(blocks), f"{guide}.md", "exec"), {"__name__": guide})
