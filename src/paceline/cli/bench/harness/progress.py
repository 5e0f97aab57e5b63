"""How far a measurement is: a bar on a terminal, else a few lines. Drawn between rounds only."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINES = 5
"""How many lines there are for a run that nobody watches live."""


@dataclass
class RoundBar:
    """Shows how many rounds of one run are done, on stderr. Picklable until it is entered.

    Without a thread of its own: one that redraws on a timer would take the GIL from the step that
    is being measured.

    Attributes:
        title: What is being measured.
        rounds: How many there will be.
        is_shown: False on all ranks but one.
    """

    title: str
    rounds: int
    is_shown: bool = True
    _done: int = field(default=0, init=False)
    _progress: Progress | None = field(default=None, init=False)

    def __enter__(self) -> RoundBar:
        console = Console(stderr=True)
        if self.is_shown and console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self.title, total=self.rounds, note="")
            self._progress.refresh()
        return self

    def advance(self, note: str = "") -> None:
        """One more round is done."""
        self._done += 1
        if self._progress is not None:
            self._progress.update(self._task, advance=1, note=note)
            self._progress.refresh()
        elif self.is_shown and self._is_line_due():
            end = f", {note}" if note else ""
            print(f"{self.title}: {self._done} of {self.rounds}{end}", file=sys.stderr, flush=True)

    def _is_line_due(self) -> bool:
        every = -(-self.rounds // PLAIN_LINES)
        return self._done % every == 0 or self._done == self.rounds

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
