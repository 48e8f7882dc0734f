"""The page: one HTML file with its data, its script and the charting library inside; it needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import alasso
from alasso.bench import metrics
from alasso.bench.labels import count_of
from alasso.bench.probe.section import probe_section
from alasso.bench.registry import BENCHMARKS
from alasso.bench.report import charts, page_parts
from alasso.bench.report.aggregate import Group
from alasso.bench.report.figures import decoupling_groups, not_drawn
from alasso.bench.report.live import CHARTS, Progress
from alasso.bench.report.load import Collected
from alasso.bench.report.page_parts import json_script, numbers_table, summary, text
from alasso.bench.report.sections import Section, sections, telling_first

#: Cells of accuracy matrices that a page holds, about half a megabyte; the main lines come first.
MOST_CELLS = 100_000
MOST_BYTES = 3_000_000  # a page beyond that goes without the matrices

#: Nothing from outside, even if a bug let a string of a result file through.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"

CAPTIONS: dict[str, tuple[str, str]] = {
    "mean-accuracy": ("Mean accuracy", "over the tasks learned so far"),
    "spread": ("Spread over tasks", "standard deviation of accuracy over the tasks learned so far"),
    "one-task": ("One task over time", "accuracy of one task while later ones are learned"),
    "bars": ("Every fifth task", "accuracy after learning all tasks"),
    "decoupling": ("Parameter decoupling", "mean accuracy of ALASSO with and without"),
    "memory": ("Episodic memory", "mean accuracy of methods that keep examples, and of the same without"),
    "matrix": ("Accuracy matrix", "mean over seeds, on every task after learning every task"),
}


def build(found: Collected, live: Sequence[Progress] | None = None, opening: str = "") -> str:
    """The whole page.

    ``live``: runs still going on, when the page is served and refreshes itself; ``opening``: a section that stands
    before the results, as HTML.
    """
    whole = _build(found, live, opening, MOST_CELLS)
    return whole if len(whole.encode()) <= MOST_BYTES else _build(found, live, opening, 0)


def _build(found: Collected, live: Sequence[Progress] | None, opening: str, most_cells: int) -> str:
    library, version = charts.library()
    parts = telling_first(sections(found.results))
    body = [header(found, parts), opening]
    if live is not None:
        body.append(live_section(live))
    body += [section_html(number, section, matrix_groups(parts, most_cells)) for number, section in enumerate(parts)]
    body += [probe_section(found.probes), page_parts.left_out(found.left_out)]
    watching = ' data-watch=""' if live is not None else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title(parts, found)}</title><style>{asset('page.css')}</style></head>\n<body{watching}>"
        f"<main>{''.join(body)}</main>"
        f"<footer>alasso {text(alasso.__version__)}; charts by Bokeh {text(version)}.</footer>\n"
        f"<script>{library}</script>\n<script>{asset('page.js')}</script></body></html>\n"
    )


def asset(name: str) -> str:
    return (files("alasso.bench.report") / "assets" / name).read_text(encoding="utf-8")


def title(parts: Sequence[Section], found: Collected) -> str:
    nothing = "the shape of the loss" if found.probes else "no results yet"
    return text("alasso: " + ("; ".join(section.title for section in parts[:3]) or nothing))


def header(found: Collected, parts: Sequence[Section]) -> str:
    repeats = sum(group.repeats for section in parts for group in section.groups)
    facts = [count_of(len(found.results), "result")] if found.results or not found.probes else []
    facts += [count_of(len(found.probes), "probe")] if found.probes else []
    facts += [f"{repeats} repeated, the newest of each shown"] if repeats else []
    facts += [f'<a href="#left-out">{len(found.left_out)} left out</a>'] if found.left_out else []
    links = [f'<li><a href="#section-{n}">{text(section.title)}</a></li>' for n, section in enumerate(parts)]
    links += ['<li><a href="#probe-0">the shape of the loss</a></li>'] if found.probes else []
    nav = f'<nav aria-label="Benchmarks"><ul>{"".join(links)}</ul></nav>' if len(links) > 1 else ""
    return f"<header><h1>Continual learning</h1><p>{' · '.join(facts)}</p>{nav}</header>"


def matrix_groups(parts: Sequence[Section], room: int) -> set[str]:
    """Keys of the groups whose matrix the page holds, as many as there is room for."""
    wanted = [(section.tasks, group) for section in parts for group in section.headline]
    wanted += [(section.tasks, group) for section in parts for group in section.groups]
    chosen: set[str] = set()
    for tasks, group in wanted:
        cells = tasks * (tasks + 1) // 2
        if group.config.hash not in chosen and cells <= room:
            room -= cells
            chosen.add(group.config.hash)
    return chosen


# -- a section ----------------------------------------------------------------------------------------------------


def section_html(number: int, section: Section, chosen: set[str]) -> str:
    with_matrix = [group for group in section.groups if group.config.hash in chosen]
    drawn = charts.section_charts(section, with_matrix)
    known = BENCHMARKS.get(section.benchmark)
    about = known.title if known else ""
    figures = "".join(
        figure_html(number, section, name, drawn[name], with_matrix) for name in CAPTIONS if name in drawn
    )
    runs = "".join(page_parts.run_details(section, group) for group in section.groups)
    return (
        f'<section class="benchmark" id="section-{number}"><h2>{text(section.title)}</h2>'
        f'<p class="about">{text(about)}</p>{page_parts.legend(section)}<div class="charts">{figures}</div>'
        f"<h3>Measures</h3>{page_parts.measures_table(section)}{page_parts.sensitivity_table(section)}"
        f"<h3>Settings and machine</h3>{runs}"
        f"{json_script(f'matrices-{number}', {g.config.hash: matrix_data(section, g) for g in with_matrix})}</section>"
    )


def figure_html(number: int, section: Section, name: str, data: dict[str, Any], with_matrix: Sequence[Group]) -> str:
    """A chart with its title, its controls, its sentence for who does not see it, and its numbers."""
    heading, explanation = CAPTIONS[name]
    if name == "bars" and (left_out := not_drawn(section)):
        explanation += f"; {left_out}"
    if name == "mean-accuracy" and any(len(group.seeds) > 1 for group in section.groups):
        explanation += "; band: ± one standard deviation over seeds"
    identity = f"chart-{number}-{name}"
    curves = {
        "mean-accuracy": metrics.accuracy_curve,
        "spread": metrics.deviation_curve,
        "bars": page_parts.final_accuracies,
    }
    numbers = numbers_table(section, curves[name], heading) if name in curves else ""
    spoken = summary(section, curves.get(name, metrics.accuracy_curve), heading)
    controls = {"one-task": task_slider(section), "matrix": group_select(section, with_matrix)}.get(name, "")
    key = page_parts.chart_key(section, decoupling_groups(section)) if name == "decoupling" else ""
    return (
        f'<figure id="{identity}">'
        f"<figcaption><strong>{heading}</strong> <span>{text(explanation)}</span></figcaption>{key}{controls}"
        f'<div class="chart" data-chart="{name}" data-item="{identity}-data" role="img" '
        f'aria-label="{text(spoken, longest=2000)}"></div>'
        f"{numbers}{json_script(f'{identity}-data', data)}</figure>"
    )


def task_slider(section: Section) -> str:
    return (
        '<label class="control">task <input type="range" class="task-slider" min="1" '
        f'max="{section.tasks}" value="1"> <output>1</output></label>'
    )


def group_select(section: Section, groups: Sequence[Group]) -> str:
    options = "".join(
        f'<option value="{text(group.config.hash)}">{text(section.label(group))}</option>' for group in groups
    )
    return f'<label class="control">of <select class="group-select">{options}</select></label>'


def matrix_data(section: Section, group: Group) -> list[list[int]]:
    """Rows of the mean matrix in ten-thousandths: half the letters of decimal fractions."""
    mean = group.matrices.mean(axis=0)
    return [[round(10_000 * float(value)) for value in mean[t, : t + 1]] for t in range(section.tasks)]


# -- runs still going on ------------------------------------------------------------------------------------------


def live_section(live: Sequence[Progress]) -> str:
    """Charts that the script fills in from the server as logs grow."""
    if not live:
        return (
            '<section id="live"><h2>Running</h2><p>No run is being logged here. '
            "Start one with <code>alasso run … --log csv</code> and this folder as <code>--out</code>.</p></section>"
        )
    figures = []
    for key, ylabel, xlabel in CHARTS:
        series = {progress.label: (progress.look, *progress.series(key)) for progress in live}
        data = charts.as_data(charts.live_chart(ylabel, xlabel, series))
        figures.append(
            f"<figure><figcaption><strong>{text(ylabel[0].upper() + ylabel[1:])}</strong></figcaption>"
            f'<div class="chart" data-live="{key}" data-item="live-{key}-data" role="img" '
            f'aria-label="{text(ylabel)} of runs still going on"></div>{json_script(f"live-{key}-data", data)}</figure>'
        )
    runs = "".join(
        f'<li>{page_parts.swatch(progress.look)}{text(progress.label)}: <span data-log="{text(progress.label)}">'
        f"{count_of(len(progress.tasks), 'task')} learned</span></li>"
        for progress in live
    )
    return (
        f'<section id="live"><h2>Running</h2><ul class="running" aria-live="polite">{runs}</ul>'
        f'<div class="charts">{"".join(figures)}</div></section>'
    )
