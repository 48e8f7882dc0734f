"""The page: one HTML file with its data, its script and the charting library inside; it needs no network.

Templates lie in ``templates/``, style and script in ``assets/``. Every string that a template shows is escaped, so that
what a result file says is shown and never obeyed. The script draws the charts from numbers with BokehJS.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from io import BytesIO
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import alasso
from alasso.bench import metrics
from alasso.bench.config import count_of
from alasso.bench.probe import Measured
from alasso.bench.probe.figures import sides, surrogates
from alasso.bench.registry import BENCHMARKS, METHODS, Look
from alasso.bench.report.aggregate import MEASURES, Array, Curve, Group
from alasso.bench.report.figures import EVERY, bar_groups, by_a, decoupling_groups, memory_groups, not_drawn
from alasso.bench.report.sections import Collected, Section, sections, telling_first
from alasso.bench.report.style import number, plain, style, tick_places

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from alasso.bench.report.watch import Progress

#: Cells of accuracy matrices that a page holds, about half a megabyte; the main lines come first.
MOST_CELLS = 100_000
#: Nothing from outside, even if a bug let a string of a result file through.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
BOUNDS = ("single-task", "multi-task")  # methods that see what no continual learner sees
LONGEST = 1000  # letters of any one string from a file
LONGEST_FACT = 300  # and of one about the machine

#: Live charts: key, what the ordinate and the abscissa are called.
LIVE_CHARTS = (
    ("mean_accuracy", "mean accuracy", "tasks learned"),
    ("learned", "accuracy of the task just learned", "tasks learned"),
    ("loss", "loss", "epochs"),
    ("penalty", "penalty", "epochs"),
)


@dataclass(frozen=True)
class ClaimRow:
    """One claim: what it says, where, its numbers (as the columns name them), its verdict.

    Args:
        says: The claim in words.
        where: Where it stands.
        numbers: The cells between the claim and its verdict.
        verdict: In words.
        kind: The verdict that colours it; empty for none.
    """

    says: str
    where: str
    numbers: Sequence[str]
    verdict: str
    kind: str = ""


@dataclass(frozen=True)
class Claims:
    """Verdicts on claims, as the page shows them before its results.

    Args:
        title: Heading of the section.
        note: A sentence under it.
        columns: Headings of the table: of the claim, of its numbers, of its verdict.
        topics: Claims by topic.
    """

    title: str
    note: str
    columns: Sequence[str]
    topics: Mapping[str, Sequence[ClaimRow]]


def build(
    found: Collected, live: Sequence[Progress] | None = None, claims: Claims | None = None, version: str = ""
) -> str:
    """Builds the whole page.

    Args:
        found: Results and probes.
        live: Runs that go on, when the page is served and refreshes itself.
        claims: Verdicts that stand before the results.
        version: What the server calls this page.

    Returns:
        One HTML document.
    """
    parts = telling_first(sections(found.results))
    chosen = matrix_groups(parts)
    library, bokeh_version = bokeh()
    page = templates().get_template("page.html")
    return page.render(
        found=found,
        live=None if live is None else live_view(live),
        claims=claims,
        sections=[section_view(place, section, chosen) for place, section in enumerate(parts)],
        probes=[probe_view(measured) for measured in found.probes],
        repeats=sum(group.repeats for section in parts for group in section.groups),
        version=alasso.__version__,
        bokeh=bokeh_version,
        policy=Markup(POLICY),
        served=version,
        library=Markup(library),
        style=asset("page.css"),
        script=asset("page.js"),
    )


def templates() -> Environment:
    """Templates that escape and shorten whatever is not HTML already, and stumble over a name that is not there."""

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else plain(value, LONGEST)

    made = Environment(
        loader=PackageLoader("alasso.bench.report"),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters["count_of"] = count_of
    return made


def asset(name: str) -> Markup:
    return Markup((files("alasso.bench.report") / "assets" / name).read_text(encoding="utf-8"))


def bokeh() -> tuple[str, str]:
    """BokehJS itself, to be put into the page, and its version."""
    import bokeh.resources

    scripts = bokeh.resources.Resources(mode="inline", components=["bokeh", "bokeh-api"]).js_raw
    return "\n".join(scripts), str(bokeh.__version__)


# -- a section ----------------------------------------------------------------------------------------------------


def section_view(place: int, section: Section, chosen: set[str]) -> dict[str, Any]:
    """What the template of a section shows."""
    known = BENCHMARKS.get(section.benchmark)
    charts = section_charts(section)
    with_matrix = [group for group in section.drawn if group.config.hash in chosen]
    headline = {group.config.hash for group in section.headline}
    looks = {group.config.hash: look_data(section.look(group)) for group in section.drawn}
    figures = [figure_view(section, name, chart) for name, chart in charts.items()]
    if section.tasks > 1 and with_matrix:
        figures.append(figure_view(section, "one-task", {}))
        figures.append(figure_view(section, "matrix", {}))
    order = list(CAPTIONS)
    return {
        "id": f"section-{place}",
        "title": section.title,
        "about": known.title if known else "",
        "keys": [key_view(section, group, group.config.hash in headline) for group in section.drawn],
        "settings": len(section.groups),
        "figures": sorted(figures, key=lambda figure: order.index(figure["name"])),
        "tasks": section.tasks,
        "with_matrix": [(group.config.hash, section.label(group)) for group in with_matrix],
        "headings": [heading for _, heading, _ in MEASURES],
        "rows": measure_rows(section),
        "bounds": [method for method in BOUNDS if method in section.standard],
        "sensitivity": sensitivity(section),
        "runs": [run_view(section, group) for group in section.drawn],
        "data": {
            "ticks": tick_places(section.tasks),
            "groups": {key: {"label": section.labels[key], "shown": key in headline, **looks[key]} for key in looks},
            "charts": charts,
            "matrices": {group.config.hash: matrix_data(group) for group in with_matrix},
        },
    }


def key_view(section: Section, group: Group, shown: bool = True) -> dict[str, Any]:
    return {"hash": group.config.hash, "label": section.label(group), "look": section.look(group), "shown": shown}


def look_data(look: Look) -> dict[str, Any]:
    """A look as the script takes it."""
    dashes = [max(1, round(2 * dash)) for dash in look.dashes]
    names = ("light", "dark", "marker", "further", "hatch")
    return {**{name: getattr(look, name) for name in names}, "dashes": dashes}


CAPTIONS: dict[str, tuple[str, str]] = {
    "mean-accuracy": ("Mean accuracy", "over the tasks learned so far"),
    "spread": ("Spread over tasks", "standard deviation of accuracy over the tasks learned so far"),
    "one-task": ("One task over time", "accuracy of one task while later ones are learned"),
    "bars": ("Every fifth task", "accuracy after learning all tasks"),
    "decoupling": ("Parameter decoupling", "mean accuracy of ALASSO with and without"),
    "memory": ("Episodic memory", "mean accuracy of methods that keep examples, and of the same without"),
    "matrix": ("Accuracy matrix", "mean over seeds, on every task after learning every task"),
}


def section_charts(section: Section) -> dict[str, dict[str, Any]]:
    """Chart name → its numbers, for those that this section's results give."""
    accuracy, deviation = metrics.accuracy_curve, metrics.deviation_curve
    charts = {
        "mean-accuracy": curves(section.drawn, accuracy, "mean accuracy"),
        "spread": curves(section.drawn, deviation, "std over tasks"),
    }
    shown = bar_groups(section)
    if shown and section.tasks >= EVERY:
        final = {group.config.hash: rounded(group.curve(final_accuracies)[0][EVERY - 1 :: EVERY]) for group in shown}
        charts["bars"] = {"y": "final accuracy", "always": True, "every": EVERY, "bars": final}
    for name, groups in (("decoupling", decoupling_groups(section)), ("memory", memory_groups(section))):
        if groups:
            charts[name] = {**curves(groups, accuracy, "mean accuracy"), "always": True}
    return charts


def curves(groups: Sequence[Group], of: Curve, ylabel: str) -> dict[str, Any]:
    """Means over seeds, and deviations where there are several."""
    lines = {}
    for group in groups:
        mean, deviation = group.curve(of)
        band = rounded(deviation) if len(group.results) > 1 else None
        lines[group.config.hash] = {"mean": rounded(mean), "deviation": band}
    return {"y": ylabel, "always": False, "lines": lines}


def rounded(values: Array) -> list[float]:
    """As many digits as hovering shows: pages with many lines stay small."""
    return [round(float(value), 4) for value in values]


def figure_view(section: Section, name: str, chart: Mapping[str, Any]) -> dict[str, Any]:
    """A chart with its title, its sentence for who does not see it, and its numbers."""
    heading, explanation = CAPTIONS[name]
    if name == "bars" and (left_out := not_drawn(section)):
        explanation += f"; {left_out}"
    if name == "mean-accuracy" and any(len(group.seeds) > 1 for group in section.groups):
        explanation += "; band: ± one standard deviation over seeds"
    of = {"mean-accuracy": metrics.accuracy_curve, "spread": metrics.deviation_curve, "bars": final_accuracies}
    means = {section.label(group): group.curve(of.get(name, of["mean-accuracy"]))[0] for group in section.headline}
    ends = "; ".join(f"{label} {number(float(mean[-1]))}" for label, mean in means.items())
    own = chart.get("lines", ()) if name in ("decoupling", "memory") else ()
    return {
        "name": name,
        "heading": heading,
        "explanation": explanation,
        "spoken": f"{heading} after {count_of(section.tasks, 'task')}: {ends}.",
        "keys": [key_view(section, group) for group in section.groups if group.config.hash in own],
        "labels": list(means),
        "numbers": [[number(one) for one in row] for row in zip(*means.values(), strict=True)] if name in of else [],
    }


def final_accuracies(accuracy: Sequence[Sequence[float]]) -> list[float]:
    """After all tasks, the accuracy on each."""
    return list(accuracy[-1])


def matrix_groups(parts: Sequence[Section]) -> set[str]:
    """Keys of the groups whose accuracy matrix the page holds, as many as there is room for."""
    room = MOST_CELLS
    chosen: set[str] = set()
    for groups in ([s.headline for s in parts], [s.drawn for s in parts]):
        for group in (group for of_section in groups for group in of_section):
            tasks = len(group.results[0].accuracy)
            cells = tasks * (tasks + 1) // 2
            if group.config.hash not in chosen and cells <= room:
                room -= cells
                chosen.add(group.config.hash)
    return chosen


def matrix_data(group: Group) -> list[list[int]]:
    """Rows of the mean matrix in ten-thousandths: half the letters of decimal fractions."""
    mean = group.matrices.mean(axis=0)
    return [[round(10_000 * float(value)) for value in row[: task + 1]] for task, row in enumerate(mean)]


# -- tables -------------------------------------------------------------------------------------------------------


def measure_rows(section: Section) -> list[dict[str, Any]]:
    """A row a group: its key, and for every measure (value, mean and deviation in words, whether it is the best)."""
    best = {}
    for measure, _, more in MEASURES:
        rivals = [group.mean(measure) for group in section.groups if group.method not in BOUNDS]
        known = [mean for mean in rivals if mean is not None]
        best[measure] = (max if more else min)(known) if len(set(known)) > 1 and more is not None else None
    rows, drawn = [], {group.config.hash for group in section.drawn}
    for group in section.groups:
        cells = []
        for measure, _, _ in MEASURES:
            digits = 1 if measure == "seconds" else 3
            found = group.over_seeds(measure)
            spread = f"± {number(found.deviation, digits)}" if found and found.deviation is not None else ""
            is_best = found is not None and found.value == best[measure] and group.method not in BOUNDS
            mean = found.value if found else None
            cells.append(("" if mean is None else repr(mean), number(mean, digits), spread, is_best))
        shown = group.config.hash in drawn
        rows.append({**key_view(section, group, shown), "cells": cells, "seeds": len(group.results)})
    return rows


def sensitivity(section: Section) -> list[tuple[str, str, str]]:
    """(a, mean accuracy, its share of the way from the least to the largest); nothing where a was not varied."""
    means = {a: group.mean("A") or 0.0 for a, group in by_a(section).items()}
    low, high = min(means.values(), default=0.0), max(means.values(), default=0.0)
    return [(f"{a:g}", number(mean), f"{(mean - low) / (high - low or 1):.3f}") for a, mean in means.items()]


def run_view(section: Section, group: Group) -> dict[str, Any]:
    """Settings, machine and seeds behind a line."""
    settings = {key: value for key, value in group.config.flat().items() if value is not None}
    aside = ("seed", "benchmark", "method")
    return {
        **key_view(section, group),
        "title": METHODS[group.method].title if group.method in METHODS else group.method,
        "seeds": ", ".join(map(str, group.seeds)),
        "repeats": group.repeats,
        "facts": {
            "Settings": {key: value for key, value in settings.items() if key not in aside},
            "Machine": machine(group),
        },
    }


def machine(group: Group) -> dict[str, str]:
    """Environment of the runs; where seeds ran in different ones, all values."""
    seen: dict[str, list[str]] = {}
    for result in group.results:
        for key, value in {**result.environment, "data": result.data}.items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{name} ({inner})" for name, inner in value.items())
            # Which runs older versions trained beside this one says nothing about the machine.
            if value is not None and key not in ("stack", "diverged"):
                seen.setdefault(plain(key), []).append(plain(value, LONGEST_FACT))
    finished = seen.get("finished", [])
    if len(set(finished)) > 1:
        seen["finished"] = [f"{min(finished)} to {max(finished)}"]
    return {key: ", ".join(dict.fromkeys(values)) for key, values in seen.items() if any(values)}


# -- probes and runs that go on -----------------------------------------------------------------------------------


def probe_view(measured: Measured) -> dict[str, Any]:
    """A probe's findings, with its figures as SVG."""
    figures = {
        "The change of the loss as one weight is moved, and how uneven its sides are": sides(measured),
        "The loss along one weight's line, and what SI and ALASSO take it for": surrogates(measured),
    }
    return {
        "title": f"The shape of the loss: {measured.config['benchmark']}, first task, seed {measured.seed}",
        "figures": {about: as_address(figure) for about, figure in figures.items() if figure is not None},
        "statement": measured.statement(),
    }


@style()
def as_address(figure: Figure) -> str:
    """A drawing as the address of an image: SVG, in the page itself."""
    content = BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(content.getvalue()).decode()


def live_view(live: Sequence[Progress]) -> dict[str, Any]:
    """Charts that the script fills in from the server as logs grow."""
    data = {progress.label: {**asdict(progress), **look_data(progress.look)} for progress in live}
    return {"runs": live, "charts": LIVE_CHARTS, "data": data}
