"""How far a probe has come, for whom waits for it: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from alasso.bench.training.progress import clock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: Told what is going on, how much of it is done and how much there is in all.
Watch = Callable[[str, float, float], None]

SECONDS_BETWEEN_LINES = 10.0


def unwatched(what: str, done: float, total: float) -> None:
    pass


class ShownProgress:
    """A :data:`Watch`; one kind of work begins when the one before it is done."""

    def __init__(self, console: Console, say: Callable[[str], None]) -> None:
        self.console, self.say = console, say
        self.bar: Progress | None = None
        self.began = self.last_said = time.monotonic()
        self.going_on = ""

    def __call__(self, what: str, done: float, total: float) -> None:
        now = time.monotonic()
        if what != self.going_on:
            self.close()
            self.going_on, self.began, self.last_said = what, now, now
            if self.console.is_terminal:
                self.bar = self._started_bar(what, total)
        note = f"{clock((now - self.began) * (total - done) / done)} left" if done else ""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, note=note)
        elif 0 < done < total and now - self.last_said > SECONDS_BETWEEN_LINES:
            self.last_said = now
            self.say(f"{what}: {done / total:.0%} done, {note}")
        if done >= total:
            self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.going_on = None, ""

    def _started_bar(self, what: str, total: float) -> Progress:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn())
        bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True)
        bar.add_task(what, total=total, note="")
        bar.start()
        return bar
