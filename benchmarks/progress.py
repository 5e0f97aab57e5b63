"""A progress bar that rank 0 draws between rounds, never during one."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass
class RoundBar:
    """Shows how many rounds of one run are done. Picklable until it is entered.

    Without a thread of its own: one that redraws on a timer would take the GIL from the step that
    is being measured.
    """

    title: str
    rounds: int
    quiet: bool = False

    def __enter__(self) -> None:
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if self.quiet or dist.get_rank() != 0 or not console.is_terminal:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._progress.start()
        self._task = self._progress.add_task(self.title, total=self.rounds)
        self._progress.refresh()

    def advance(self) -> None:
        """One more round is done."""
        if self._progress is not None:
            self._progress.update(self._task, advance=1)
            self._progress.refresh()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
