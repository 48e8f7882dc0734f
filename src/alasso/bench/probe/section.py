"""What probes measured, as a section of the page: the paper's first two figures, and the findings in words."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from alasso.bench.probe import figures as probe_figures
from alasso.bench.probe.findings import Measured
from alasso.bench.report.drawing import style
from alasso.bench.report.page_parts import text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 500  # letters of a finding


def probe_section(probes: Sequence[Measured]) -> str:
    """Empty where nothing was probed."""
    return "".join(_one(number, measured) for number, measured in enumerate(probes))


def _one(number: int, measured: Measured) -> str:
    title = f"The shape of the loss: {text(measured.config['benchmark'])}, first task, seed {measured.seed}"
    drawn = {
        "The change of the loss as one weight is moved, and how uneven its sides are": probe_figures.sides(measured),
        "The loss along one weight's line, and what SI and ALASSO take it for": probe_figures.surrogates(measured),
    }
    figures = "".join(_figure(about, figure) for about, figure in drawn.items() if figure is not None)
    found = "".join(f"<li>{text(line, LONGEST)}</li>" for line in measured.statement())
    return f'<section class="benchmark" id="probe-{number}"><h2>{title}</h2>{figures}<ul>{found}</ul></section>'


def _figure(about: str, figure: Figure) -> str:
    content = io.BytesIO()
    with style():
        figure.savefig(content, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(content.getvalue()).decode()
    return f'<figure><img class="drawn" src="data:image/svg+xml;base64,{encoded}" alt="{text(about)}"></figure>'
