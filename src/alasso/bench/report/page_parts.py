"""Pieces of the page as HTML. Every string from a file goes through :func:`text`, so it is shown, never obeyed."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from alasso.bench.labels import count_of
from alasso.bench.registry import METHODS, Look
from alasso.bench.report.aggregate import MEASURES, Curve, Group, mean_and_spread
from alasso.bench.report.drawing import group_look
from alasso.bench.report.figure_tables import sensitivity_rows
from alasso.bench.report.sections import Section
from alasso.bench.report.style import number, plain

LONGEST = 300  # letters of any one string from a file


def text(value: object, longest: int = LONGEST) -> str:
    return html.escape(plain(value, longest), quote=True)


def json_script(identity: str, data: Any) -> str:
    """Data for the page's script; no ``<`` inside can end the element."""
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{text(identity)}">{packed}</script>'


# -- legend -------------------------------------------------------------------------------------------------------


def legend(section: Section) -> str:
    """Real buttons: reached by Tab, pressed by Space, said by a screen reader."""
    keys = []
    for group in section.groups:
        pressed = "true" if any(group is shown for shown in section.headline) else "false"
        keys.append(
            f'<button type="button" class="key" data-group="{text(group.config.hash)}" aria-pressed="{pressed}">'
            f"{swatch(group_look(section, group))}{text(section.label(group))}</button>"
        )
    hint = '<span class="hint">Press a name to show or hide it</span>'
    return f'<div class="legend" role="group" aria-label="Lines shown">{"".join(keys)}{hint}</div>'


def chart_key(section: Section, groups: Sequence[Group]) -> str:
    """Which line is which in one chart that shows its groups whatever the legend's buttons say at first."""
    keys = "".join(f"<li>{swatch(group_look(section, group))}{text(section.label(group))}</li>" for group in groups)
    return f'<ul class="chart-key">{keys}</ul>'


def swatch(look: Look) -> str:
    dashes = " ".join(f"{dash:g}" for dash in look.dashes)
    return (
        f'<svg width="32" height="8" aria-hidden="true" '
        f'style="--on-light:{look.light};--on-dark:{look.dark};--width:{2 if look.further else 3}">'
        f'<line x1="0" x2="32" y1="4" y2="4" stroke-dasharray="{dashes}"/></svg>'
    )


# -- tables -------------------------------------------------------------------------------------------------------


def measures_table(section: Section) -> str:
    """A row a group; every column can be sorted by."""
    heads = [("method", "text"), *((name, "number") for _, name, _ in MEASURES), ("seeds", "number")]
    cells = "".join(
        f'<th scope="col" data-kind="{kind}"><button type="button">{text(name)}</button></th>' for name, kind in heads
    )
    rows = "".join(_measures_row(section, group) for group in section.groups)
    bounds = [name for name in ("single-task", "multi-task") if any(g.config.method == name for g in section.groups)]
    above = f" Upper bounds: {', '.join(bounds)}." if bounds else ""
    return (
        f'<p class="caption">Mean over seeds ± standard deviation; select a heading to sort.{above}</p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Measures of every method">'
        f'<table class="sortable"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _measures_row(section: Section, group: Group) -> str:
    key = text(group.config.hash)
    name = f'{swatch(group_look(section, group))}<a href="#run-{key}">{text(section.label(group))}</a>'
    cells = [f'<th scope="row">{name}</th>']
    for measure, _, _ in MEASURES:
        mean, spread = mean_and_spread(group.measures[measure])
        digits = 1 if measure == "seconds" else 3
        shown = number(mean, digits)
        if spread is not None:
            shown += f' <span class="spread">± {number(spread, digits)}</span>'
        cells.append(f'<td data-value="{"" if mean is None else repr(mean)}">{shown}</td>')
    cells.append(f'<td data-value="{len(group.results)}">{len(group.results)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def numbers_table(section: Section, of: Curve, title: str) -> str:
    """A chart's numbers as a table: its text alternative."""
    curves = [(section.label(group), group.curve(of)[0]) for group in section.headline]
    head = "".join(f'<th scope="col">{text(label)}</th>' for label, _ in curves)
    rows = "".join(
        f'<tr><th scope="row">{task + 1}</th>{"".join(f"<td>{number(curve[task])}</td>" for _, curve in curves)}</tr>'
        for task in range(section.tasks)
    )
    return (
        f'<details><summary>Numbers</summary><div class="scroll" tabindex="0" role="region" aria-label="{text(title)}">'
        f'<table><thead><tr><th scope="col">tasks</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def sensitivity_table(section: Section) -> str:
    """Mean accuracy by a, coloured; nothing where a was not varied."""
    rows = sensitivity_rows([result for group in section.groups for result in group.results])
    if not rows:
        return ""
    (by_a,) = rows.values()
    means = {a: group.mean("A") or 0.0 for a, group in by_a.items()}
    low, high = min(means.values()), max(means.values())
    head = "".join(f'<th scope="col">{a:g}</th>' for a in means)
    cells = "".join(
        f'<td style="--share:{(mean - low) / (high - low or 1):.3f}">{number(mean)}</td>' for mean in means.values()
    )
    return (
        "<h3>Sensitivity to <i>a</i></h3>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Sensitivity to a"><table class="heat">'
        f'<thead><tr><th scope="col">a</th>{head}</tr></thead>'
        f'<tbody><tr><th scope="row">mean accuracy A</th>{cells}</tr></tbody></table></div>'
    )


# -- what is behind a line ----------------------------------------------------------------------------------------


def run_details(section: Section, group: Group) -> str:
    """Settings, machine and seeds of one group."""
    config = group.config.values()
    method = METHODS[group.method].title if group.method in METHODS else group.method
    settings = {**config.pop("settings"), **config}
    for key in ("seed", "benchmark", "method"):
        settings.pop(key)
    shown = {key: value for key, value in settings.items() if value is not None}
    repeats = f" ({group.repeats} repeated runs: the newest is shown)" if group.repeats else ""
    return (
        f'<details class="run" id="run-{text(group.config.hash)}"><summary>{text(section.label(group))}</summary>'
        f"<p>{text(method)}. Seeds {text(', '.join(map(str, group.seeds)))}{text(repeats)}; config "
        f"<code>{text(group.config.hash)}</code>.</p>"
        f'<div class="pair">{definitions("Settings", shown)}{definitions("Machine", machine(group))}</div></details>'
    )


def definitions(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in values.items())
    return f"<div><h4>{text(title)}</h4><dl>{rows}</dl></div>"


def machine(group: Group) -> dict[str, str]:
    """Environment of the runs; where seeds ran in different ones, all values."""
    seen: dict[str, list[str]] = {}
    for result in group.results:
        for key, value in {**without_companions(result.environment), "data": result.data}.items():
            shown = plain(_spoken(value), LONGEST)
            if value is not None and shown not in seen.setdefault(plain(key), []):
                seen[plain(key)].append(shown)
    finished = seen.get("finished", [])
    if len(finished) > 1:
        seen["finished"] = [min(finished), max(finished)]
    return {key: (" to " if key == "finished" else ", ").join(values) for key, values in seen.items() if values}


def without_companions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Names of other runs say nothing about the machine."""
    return {key: value for key, value in environment.items() if key not in ("stack", "diverged")}


def _spoken(value: object) -> object:
    return ", ".join(f"{key} ({inner})" for key, inner in value.items()) if isinstance(value, Mapping) else value


def final_accuracies(accuracy: Sequence[Sequence[float]]) -> list[float]:
    """After all tasks, the accuracy on each: for the table beside the bars."""
    return list(accuracy[-1])


def summary(section: Section, of: Curve, what: str) -> str:
    """A chart in one sentence, for who does not see it: the last value of every line."""
    ends = [f"{section.label(group)} {number(float(group.curve(of)[0][-1]))}" for group in section.headline]
    return f"{what} after {count_of(section.tasks, 'task')}: {'; '.join(ends)}."


def left_out(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return (
        f'<section id="left-out"><h2>Left out</h2><p>{len(lines)} '
        f"{'file was' if len(lines) == 1 else 'files were'} not shown:</p><ul>{items}</ul></section>"
    )
