"""Every figure that a set of results gives, into a folder: PNG for slides, SVG and PDF for papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alasso.bench.io import disk_errors_as_advice
from alasso.bench.report import figure_tables, figures
from alasso.bench.report.drawing import matplotlib, style
from alasso.bench.report.sections import Section, sections
from alasso.bench.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")

#: Figures of one section: name, function, what is missing where it gives none.
OF_A_SECTION: tuple[tuple[str, Callable[[Sequence[Result]], Figure | None], str], ...] = (
    ("mean-accuracy", figures.mean_accuracy, ""),
    ("spread-over-tasks", figures.task_deviation, ""),
    ("single-tasks", figures.chosen_tasks, "no run of si or alasso with two tasks or more"),
    ("every-fifth-task", figures.task_bars, "fewer than five tasks, or none of single-task, ewc, si, alasso"),
    ("decoupling", figures.decoupling, "no alasso both with and without decoupling (a_prime=a, c_prime=c)"),
    ("memory", figures.memory, "no run of alasso-memory or vcl-coreset"),
)
OF_ALL: tuple[tuple[str, Callable[[Sequence[Result]], Figure | None], str], ...] = (
    ("sensitivity", figure_tables.sensitivity, "no alasso runs that differ in a alone"),
    ("measures", figure_tables.measures_table, ""),
)


def write_figures(results: Sequence[Result], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw all there are; the files written, and one line for each figure that the results do not give."""
    matplotlib()
    written: list[Path] = []
    absent: list[str] = []
    for name, figure, missing in all_figures(results):
        if figure is None:
            absent.append(f"{name} is left out: {missing}")
        else:
            written += save(figure, folder, name)
    return written, absent


def all_figures(results: Sequence[Result]) -> Iterator[tuple[str, Figure | None, str]]:
    """(name, figure, what is missing where there is none) of every figure."""
    for section in sections(results):
        of_section = [result for group in section.groups for result in group.results]
        for name, draw, missing in OF_A_SECTION:
            yield f"{file_name(section)}-{name}", draw(of_section), missing
        for group in section.standard.values():
            drawn = figures.accuracy_matrix(group.results[0], section.figure_label(group))
            yield f"{file_name(section)}-matrix-{group.method}", drawn, ""
    for name, draw, missing in OF_ALL:
        yield name, draw(results), missing


def file_name(section: Section) -> str:
    # Sections of one benchmark and length differ in the folder of images, which is no good file name.
    return f"{section.benchmark}-{section.tasks}" + (f"-{section.groups[0].config.hash[:6]}" if section.path else "")


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Without dates inside: a figure drawn again from the same results is the same file."""
    paths = [folder / f"{name}.{format_}" for format_ in formats]
    with disk_errors_as_advice(folder), style():
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            stamp = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[path.suffix[1:]]
            figure.savefig(path, metadata=stamp)
    return paths
