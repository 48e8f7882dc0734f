"""Options that several commands have, the same in each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alasso.errors import AlassoError


def known_device(name: str) -> str:
    """Refuse what is no device anywhere; whether this machine has it is found out when it is needed."""
    number = name.removeprefix("cuda:")
    if name not in ("auto", "cpu", "cuda") and (number == name or not number.isdecimal()):
        raise AlassoError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:N")
    return name


OutFolder = Annotated[Path, typer.Option("--out", help="Folder for result files and checkpoints.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with the data sets; also ALASSO_DATA. Default: a cache.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", callback=known_device)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with runs that were interrupted.")]
Restart = Annotated[bool, typer.Option("--restart", help="Run again what is finished or was interrupted.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the table.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="One or several: --seed 0 1 2")]
Tasks = Annotated[int | None, typer.Option(help="Number of tasks.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over each task.")]
