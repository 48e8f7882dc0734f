"""The code in the guides runs as it is printed."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from alasso.bench.report.aggregate import MEASURES
from alasso.bench.reproduce.document import Document
from alasso.bench.reproduce.evidence import Evidence
from alasso.bench.reproduce.statistics import COMPUTATIONS
from alasso.bench.reproduce.study import Study

from run_helpers import in_process

GUIDES = Path(__file__).parent.parent / "docs" / "guides"
NEEDS = {
    "lightning": ["lightning"],
    "huggingface": ["transformers", "accelerate"],
    "lora": ["peft"],
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


def test_the_study_of_its_guide_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    text = (GUIDES / "study.md").read_text()
    experiment, claims = re.findall(r"```toml\n(.*?)```", text, re.S)
    (document,) = re.findall(r"```markdown\n(.*?)```", text, re.S)
    (tmp_path / "strength" / "experiments").mkdir(parents=True)
    for name, content in (("experiments/seeds.toml", experiment), ("claims.toml", claims), ("document.md", document)):
        (tmp_path / "strength" / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Study, "page", lambda study, judged: None)  # which takes the most of the time
    code, output, errors = in_process(["reproduce", "--study", "strength", "--device", "cpu"], monkeypatch, capsys)
    assert not code, errors
    written = (tmp_path / "runs" / "strength" / "reproduction.md").read_text()
    assert "Of 2 claims" in output and "{{" not in written and "not run" not in written
    assert "| claim | where | said | ours | bar | verdict |" in written and "paper" not in written


def test_the_guide_to_studies_names_what_there_is_and_nothing_else():
    text = (GUIDES / "study.md").read_text()
    claims, _, of_document = text.partition("## The document")
    rows = {part: re.findall(r"^\| (`.*?) \|", part, re.M) for part in (claims, of_document)}
    named = {part: {name for row in rows[part] for name in re.findall(r"`([\w-]+)", row)} for part in rows}
    assert named[claims] == {"how", *COMPUTATIONS}
    assert named[of_document] == set(Document(Evidence({}, []), []).known()) - {"quick-note"}
    (measures,) = re.findall(r"`measure` is A unless it says otherwise: (.*?)\.", claims, re.S)
    assert {"A", *re.findall(r"\w+", measures)} - {"or"} == {key for key, _, _ in MEASURES}
