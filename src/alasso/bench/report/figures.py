"""The paper's figures from results, and all of them into a folder.

Each figure is a function of a list of results: None where what it shows was not run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alasso.bench import metrics
from alasso.bench.config import RunConfig, count_of
from alasso.bench.io import disk_errors_as_advice
from alasso.bench.registry import METHODS, Look, label_of
from alasso.bench.report.aggregate import DECOUPLED, Array, Curve, Group, mean_and_deviation, over_shared_seeds
from alasso.bench.report.sections import Section, differences, evenly, one_section, sections, without_seed
from alasso.bench.report.style import INK, Line, draw_lines, new_figure, safe, seeds_note, style, tick_places, titled
from alasso.bench.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
#: Lines in the figure of single tasks over time, the oldest task first.
SHADES = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")
BAR_METHODS = ("single-task", "ewc", "si", "alasso", "kron-alasso")
EVERY = 5  # bars at every fifth task, as in the paper
MOST_NAMED = 3  # runs that a figure says it does not draw
LEAST_VALUES = 3  # of a setting that make a line
MOST_A = 25  # values of a that stand side by side


# -- lines over tasks ---------------------------------------------------------------------------------------------


def mean_accuracy(results: Sequence[Result]) -> Figure | None:
    """The paper's main figure: mean accuracy over the tasks seen so far, each method once, with the ablations."""
    section = one_section(results)
    return _over_tasks(section, section.headline, "Mean accuracy")


def task_deviation(results: Sequence[Result]) -> Figure | None:
    """How unequal the tasks are: standard deviation of accuracy over the tasks seen so far."""
    section = one_section(results)
    of, ylabel = metrics.deviation_curve, "standard deviation over tasks seen"
    return _over_tasks(section, section.headline, "Spread over tasks", of, ylabel)


def decoupling(results: Sequence[Result]) -> Figure | None:
    """ALASSO with and without parameter decoupling."""
    section = one_section(results)
    return _over_tasks(section, decoupling_groups(section), "Parameter decoupling")


def memory(results: Sequence[Result]) -> Figure | None:
    """Methods that keep examples, beside the same methods without."""
    section = one_section(results)
    return _over_tasks(section, memory_groups(section), "Episodic memory")


def decoupling_groups(section: Section) -> list[Group]:
    """ALASSO with decoupling and the one without that equals it in all else; nothing if there is no such pair."""
    alike: dict[tuple[str, ...], list[Group]] = {}  # by all that decoupling does not change
    of_alasso = [(group, _but_for(group.config, DECOUPLED)) for group in section.groups if group.method == "alasso"]
    for group, rest in of_alasso:
        alike.setdefault(rest, []).append(group)
    coupled = [(group, rest) for group, rest in of_alasso if group.variant == "no decoupling"]
    pairs = ([other, group] for group, rest in coupled for other in alike[rest] if other is not group)
    return over_shared_seeds(min(pairs, key=lambda pair: pair[0] is not section.standard["alasso"], default=[]))


def _but_for(config: RunConfig, names: Container[str]) -> tuple[str, ...]:
    return tuple(f"{name}={value!r}" for name, value in without_seed(config).items() if name not in names)


def has_memory(config: RunConfig) -> bool:
    """Whether a run keeps examples of past tasks."""
    return config.memory > 0 or config.method == "vcl-coreset"


def memory_groups(section: Section) -> list[Group]:
    """Methods with memory and their like without, nothing if none has memory."""
    with_memory = [group for group in section.drawn if has_memory(group.config)]
    without = [section.standard[method] for method in ("alasso", "vcl") if method in section.standard]
    return over_shared_seeds([*with_memory, *without]) if with_memory else []


@style()
def _over_tasks(
    section: Section,
    groups: Sequence[Group],
    title: str,
    of: Curve = metrics.accuracy_curve,
    ylabel: str = "mean accuracy of tasks seen",
) -> Figure | None:
    if not groups:
        return None
    figure, (axes,) = new_figure(height=3.4 + 0.08 * max(0, len(groups) - 8))
    lines = []
    for group in groups:
        mean, deviation = group.curve(of)
        x = np.arange(1.0, len(mean) + 1)
        lines.append(Line(section.figure_label(group), x, mean, deviation, section.look(group)))
    draw_lines(axes, lines)
    axes.set_xticks(tick_places(section.tasks))
    axes.set(xlabel="number of tasks learned", ylabel=ylabel)
    # Of a sweep a figure may show a part only, and says so; that it has each method once needs no saying.
    part = section.is_sweep and len(groups) < len(section.groups)
    shown = f"; {len(groups)} of {len(section.groups)} settings" if part else ""
    titled(axes, f"{title}: {section.title}", seeds_note(groups) + shown)
    return figure


@style()
def chosen_tasks(results: Sequence[Result]) -> Figure | None:
    """Accuracy of single tasks while later ones are learned, SI beside ALASSO."""
    section = one_section(results)
    pair = [section.standard[method] for method in ("si", "alasso") if method in section.standard]
    if not pair or section.tasks < 2:
        return None
    figure, panels = new_figure(3.6 * len(pair) + 0.6, 3.6, columns=len(pair))
    for axes, group in zip(panels, pair, strict=True):
        draw_lines(axes, _task_lines(group, spaced_tasks(section.tasks)))
        titled(axes, section.figure_label(group), seeds_note([group]))
        axes.set_xticks(tick_places(section.tasks))
        axes.set_xlabel("task just learned")
    panels[0].set_ylabel("accuracy of one task")
    return figure


def spaced_tasks(tasks: int) -> list[int]:
    """Evenly spaced tasks from the first on, counted from 0, none of them the last.

    >>> spaced_tasks(30), spaced_tasks(3)
    ([0, 6, 12, 18, 24], [0, 1])
    """
    return list(range(0, tasks - 1, max(1, -(-(tasks - 1) // len(SHADES)))))


def _task_lines(group: Group, chosen: Sequence[int]) -> list[Line]:
    """A line a task, from the moment it was learned; the older the task, the darker."""
    lines = []
    for task, colour in zip(chosen, SHADES, strict=False):
        mean, deviation = mean_and_deviation(group.matrices[:, task:, task])
        x = np.arange(task + 1.0, task + 1 + len(mean))
        lines.append(Line(f"task {task + 1}", x, mean, deviation, Look(colour, colour, "o")))
    return lines


# -- bars and matrices --------------------------------------------------------------------------------------------


@style()
def task_bars(results: Sequence[Result]) -> Figure | None:
    """Final accuracy at every fifth task, a bar a method."""
    section = one_section(results)
    shown = bar_groups(section)
    tasks = list(range(EVERY, section.tasks + 1, EVERY))
    if not shown or not tasks:
        return None
    labels = [safe(section.figure_label(group)) for group in shown]
    columns = min(len(labels), 4 if max(map(len, labels)) <= 13 else 2)
    figure, (axes,) = new_figure(height=3.2 + 0.17 * -(-len(shown) // columns))
    width = 0.82 / len(shown)
    for place, (group, label) in enumerate(zip(shown, labels, strict=True)):
        mean, deviation = mean_and_deviation(group.matrices[:, -1, EVERY - 1 :: EVERY])
        look = section.look(group)
        axes.bar(
            np.arange(len(tasks)) + (place - (len(shown) - 1) / 2) * width,
            mean,
            width * 0.92,
            yerr=deviation if len(group.results) > 1 else None,
            color=look.light,
            hatch=3 * look.hatch or None,
            edgecolor="white",
            linewidth=0,
            error_kw={"lw": 0.8, "ecolor": "#444444"},
            label=label,
        )
    axes.set_xticks(range(len(tasks)), [str(t) for t in tasks])
    axes.set(xlabel="task", ylabel="final accuracy", ylim=(0, 1))
    note = seeds_note(shown).replace("band", "bar")
    titled(axes, f"Every {EVERY}th task after learning all: {section.title}", note, not_drawn(section))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5, columnspacing=1.5)
    return figure


def bar_groups(section: Section) -> list[Group]:
    """The paper's four methods and KronALASSO; of a sweep, what it shows at first."""
    if section.is_sweep:
        return section.headline
    return [section.standard[method] for method in BAR_METHODS if method in section.standard]


def not_drawn(section: Section) -> str:
    """Which lines of other figures have no bars, and why; nothing where all have."""
    others = [section.figure_label(group) for group in section.headline if group not in bar_groups(section)]
    if not others:
        return ""
    if len(others) > MOST_NAMED:
        return f"the paper's methods and KronALASSO alone: {len(others)} other runs are not drawn"
    return f"the paper's methods and KronALASSO alone, not drawn: {', '.join(others)}"


@style()
def accuracy_matrix(result: Result, label: str | None = None) -> Figure:
    """All that one run found: accuracy on every task after learning every task. ``label``: what the run is called."""
    section = one_section([result])
    matrix = metrics.lower_triangle(result.accuracy)
    tasks = len(matrix)
    figure, (axes,) = new_figure(4.6, 4.0)
    _heat_map(axes, matrix, (0, 1), "accuracy", extent=(0.5, tasks + 0.5, tasks + 0.5, 0.5))
    axes.set_xticks(tick_places(tasks))
    axes.set_yticks(tick_places(tasks))
    axes.set(xlabel="accuracy on task", ylabel="after learning task")
    titled(axes, f"{label or section.label(section.groups[0])}, seed {result.config.seed}", section.title)
    for (row, column), value in np.ndenumerate(matrix):
        if tasks <= 12 and not np.isnan(value):
            ink = "white" if value < 0.55 else INK
            axes.text(column + 1, row + 1, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=ink)
    return figure


def _heat_map(axes: Axes, values: Array, limits: tuple[float, float], about: str, **place: Any) -> None:
    """Coloured cells without a frame, and a bar that says what colours are."""
    image = axes.imshow(values, cmap="cividis", vmin=limits[0], vmax=limits[1], **place)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.85, aspect=20, label=about)
    bar.outline.set_visible(False)


# -- sensitivity to a ---------------------------------------------------------------------------------------------


@style()
def sensitivity(results: Sequence[Result]) -> Figure | None:
    """The paper's table of mean accuracy by a, as a heat map."""
    rows = {(s.benchmark, s.tasks): row for s in sections(results) if (row := by_a(s))}
    if not rows:
        return None
    values = sorted({a for row in rows.values() for a in row})
    grid = np.array([[(row[a].mean("A") or np.nan) if a in row else np.nan for a in values] for row in rows.values()])
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    figure, (axes,) = new_figure(2.2 + 0.62 * len(values), 1.5 + 0.55 * len(rows))
    _heat_map(axes, grid, (low, high), "", aspect="auto")
    axes.set_xticks(range(len(values)), [f"{a:g}" for a in values])
    axes.set_yticks(range(len(rows)), [f"{benchmark}\n{count_of(tasks, 'task')}" for benchmark, tasks in rows])
    axes.set_xlabel("a, overestimation of the unobserved side")
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            ink = "white" if value < (low + high) / 2 else INK
            axes.text(column, row, f"{value:.3f}", ha="center", va="center", color=ink)
    titled(axes, "Sensitivity to a", "mean accuracy A after all tasks")
    return figure


def by_a(section: Section) -> dict[float, Group]:
    """The full method's groups by a, where there are two or more that differ in a alone; of very many, some."""
    standard = section.standard.get("alasso")
    if standard is None:
        return {}
    alike = [group for group in section.groups if _differ_in_a_alone(group.config, standard.config)]
    alike.sort(key=lambda group: group.variant != "accurate only")  # of two with a = 1 the one with ε counts
    found = {float(group.config.settings["a"]): group for group in alike}
    chosen = evenly(sorted(found), MOST_A)
    return {a: found[a] for a in chosen} if len(chosen) > 1 else {}


def _differ_in_a_alone(config: RunConfig, standard: RunConfig) -> bool:
    """Whether a run of ALASSO is the standard one but for a, if that; with a = 1 the symmetric one, without ε, too."""
    symmetric = config.settings.get("epsilon") == 0.0 and config.settings.get("a") == 1.0
    return set(differences(config, standard)) <= ({"a", "epsilon"} if symmetric else {"a"})


# -- accuracy by strength -------------------------------------------------------------------------------------------


@style()
def strength(results: Sequence[Result]) -> Figure | None:
    """Mean accuracy by each method's strength (c or λ) and by its damping ξ: how wide is the range that works?"""
    section = one_section(results)
    strengths = {**by_one_setting(section, "c"), **by_one_setting(section, "lam")}
    panels = [one for one in ((strengths, True), (by_one_setting(section, "xi"), False)) if one[0]]
    if not panels:
        return None
    figure, several = new_figure(4.4 * len(panels) + 0.4, 3.4, columns=len(panels))
    for axes, (found, is_strength) in zip(several, panels, strict=True):
        axes.set_xscale("log")
        lines = []
        for (method, name), groups in found.items():
            usual = METHODS[method].settings[name] if is_strength else 1.0
            x = np.array([group.config.settings[name] / usual for group in groups])
            of_seeds = [mean_and_deviation(np.array(group.measures["A"], dtype=float)) for group in groups]
            mean, deviation = (np.array(part, dtype=float) for part in zip(*of_seeds, strict=True))
            lines.append(Line(label_of(method), x, mean, deviation, METHODS[method].look))
        draw_lines(axes, lines)
        axes.set_xlabel("strength (c or λ) / its default" if is_strength else "damping ξ")
        shown = [group for groups in found.values() for group in groups]
        titled(axes, f"By {'strength' if is_strength else 'ξ'}: {section.title}", seeds_note(shown))
    several[0].set_ylabel("mean accuracy after all tasks")
    return figure


def by_one_setting(section: Section, name: str) -> dict[tuple[str, str], list[Group]]:
    """(method, setting) → its groups by the setting's number, where three or more differ in it alone."""
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in section.groups:
        value = group.config.settings.get(name)
        if group.method in METHODS and isinstance(value, int | float) and value > 0:
            alike.setdefault(_but_for(group.config, (name,)), []).append(group)
    largest: dict[tuple[str, str], list[Group]] = {}
    for groups in sorted(alike.values(), key=len):
        if len(groups) >= LEAST_VALUES:
            largest[groups[0].method, name] = sorted(groups, key=lambda group: float(group.config.settings[name]))
    return {key: largest[key] for key in sorted(largest, key=lambda key: list(METHODS).index(key[0]))}


# -- files --------------------------------------------------------------------------------------------------------

Draw = Callable[[Sequence[Result]], "Figure | None"]
#: Figures of one section: name, function, what is missing where it gives none.
OF_A_SECTION: tuple[tuple[str, Draw, str], ...] = (
    ("mean-accuracy", mean_accuracy, ""),
    ("spread-over-tasks", task_deviation, ""),
    ("single-tasks", chosen_tasks, "no run of si or alasso with two tasks or more"),
    ("every-fifth-task", task_bars, "fewer than five tasks, or none of single-task, ewc, si, alasso"),
    ("decoupling", decoupling, "no alasso both with and without decoupling (a_prime=a, c_prime=c)"),
    ("memory", memory, "no run of alasso-memory or vcl-coreset"),
    ("strength", strength, "no method with three strengths (c, lam) or dampings (xi)"),
)
#: Figures of all results.
OF_ALL: tuple[tuple[str, Draw, str], ...] = (("sensitivity", sensitivity, "no alasso runs that differ in a alone"),)


def write_figures(results: Sequence[Result], folder: Path) -> tuple[list[Path], list[str]]:
    """Draws every figure into a folder: PNG for slides, SVG and PDF for papers.

    Args:
        results: Of any benchmarks.
        folder: Where the files go; made if it is missing.

    Returns:
        The files written, and one line for each figure that the results do not give.

    Raises:
        AlassoError: The folder takes no files.
    """
    written: list[Path] = []
    absent: list[str] = []
    for name, figure, missing in _all_figures(results):
        if figure is None:
            absent.append(f"{name} is left out: {missing}")
        else:
            written += save(figure, folder, name)
    return written, absent


def _all_figures(results: Sequence[Result]) -> Iterator[tuple[str, Figure | None, str]]:
    """(name, figure, what is missing where there is none) of every figure."""
    for section in sections(results):
        # Sections of one benchmark and length differ in the folder of images, which is no good file name.
        folder = f"-{section.groups[0].config.hash[:6]}" if section.path else ""
        place = f"{section.benchmark}-{section.tasks}{folder}"
        of_section = [result for group in section.groups for result in group.results]
        for name, draw, missing in OF_A_SECTION:
            yield f"{place}-{name}", draw(of_section), missing
        for group in section.standard.values():
            drawn = accuracy_matrix(group.results[0], section.figure_label(group))
            yield f"{place}-matrix-{group.method}", drawn, ""
    for name, draw, missing in OF_ALL:
        yield name, draw(results), missing


@style()
def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Saves a figure without dates inside: drawn again from the same results it is the same file.

    Args:
        figure: What to save.
        folder: Where the files go; made if it is missing.
        name: The files' name without the ending.
        formats: Endings: png, svg, pdf.

    Returns:
        The files written.

    Raises:
        AlassoError: The folder takes no files.
    """
    paths = [folder / f"{name}.{format_}" for format_ in formats]
    with disk_errors_as_advice(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            stamp = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[path.suffix[1:]]
            figure.savefig(path, metadata=stamp)
    return paths
