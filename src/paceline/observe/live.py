"""The live table of a run: what each rank does at this moment, and whom the others wait for.

Shown by ``paceline run``: :meth:`LiveTable.render` on a terminal, :meth:`LiveTable.line` elsewhere.
It reads the ranks' files and nothing else, so it works for any run folder, also after the end. Must
not know how ranks were started, and must not import torch.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import RecordsError
from paceline.observe.membership import MembershipChange, Standing, read_membership, standing_of
from paceline.observe.records import Activity, Status
from paceline.observe.ring import read_info, read_status
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.threads import WORDS
from paceline.printable import size_text
from paceline.processes import ProcessState, host_name, process_state

if TYPE_CHECKING:
    from rich.table import Table

QUIET_S = 5.0
"""A rank that does one thing for longer than that shows since when."""

_HELD_UP_S = 2.0
"""Ranks that wait for longer than that wait for somebody who can be named now."""

_WORTH_WAITING = 0.05
"""Ranks that wait for less than this share of a step wait for nobody."""

_DOING = {
    Activity.STARTING: "starts",
    Activity.INPUT: "input",
    Activity.FORWARD: "forward",
    Activity.LOSS: "loss",
    Activity.BACKWARD: "backward",
    Activity.WAITING: "waits",
    Activity.REDUCED: "reduced",
    Activity.OPTIMIZER: "optimizer",
    Activity.ENDED: "ended",
}


class LiveTable:
    """What is known of a run's ranks now. Reads anew with every call.

    Args:
        folder: Of the run.
        ranks: Which ranks to show; one that has recorded nothing yet has an empty row. Of an
            elastic job, all that have recorded something are shown beside them.
    """

    def __init__(self, folder: RunFolder | Path, ranks: Sequence[int]) -> None:
        self._folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self._ranks = list(ranks)
        self._membership: tuple[int, Sequence[MembershipChange]] = (0, ())

    def statuses(self) -> dict[int, Status | None]:
        """What each rank says; None if it has said nothing that can be read."""
        found = {rank: self._read(rank) for rank in self._ranks}
        if self._changes():
            with contextlib.suppress(OSError):
                found |= {rank: self._read(rank) for rank in self._folder.ranks()}
        return dict(sorted(found.items()))

    def _changes(self) -> Sequence[MembershipChange]:
        """Of an elastic job, read anew only if the file has changed."""
        size = 0
        with contextlib.suppress(OSError):
            size = self._folder.membership.stat().st_size
        if size != self._membership[0]:
            self._membership = (size, read_membership(self._folder.membership))
        return self._membership[1]

    def _standings(self, statuses: dict[int, Status | None]) -> dict[int, Standing]:
        """What each rank is to the job; all are members unless it is elastic."""
        changes = self._changes()
        if not changes:
            return dict.fromkeys(statuses, Standing.MEMBER)
        return {rank: self._standing(rank, changes) for rank in statuses}

    def _standing(self, rank: int, changes: Sequence[MembershipChange]) -> Standing:
        with contextlib.suppress(OSError, RecordsError):
            info = read_info(self._folder.events(rank))
            is_here = info.host == host_name()
            is_gone = is_here and process_state(info.pid, 0) is ProcessState.DEAD
            return standing_of(info, changes, is_gone=is_gone)
        return Standing.SPARE  # it has only just been started

    def _read(self, rank: int) -> Status | None:
        """What a rank says. Since when it does that is known of this host's only: see records."""
        with contextlib.suppress(OSError, RecordsError):
            status = read_status(self._folder.events(rank))
            is_here = read_info(self._folder.events(rank)).host == host_name()
            return status if is_here else replace(status, since_ns=0)
        return None

    def _training(self, statuses: dict[int, Status | None]) -> dict[int, Status | None]:
        standings = self._standings(statuses)
        return {r: s for r, s in statuses.items() if standings[r] is Standing.MEMBER}

    def _caption(self, statuses: dict[int, Status | None]) -> str:
        """Whom the others wait for, and how often ranks of an elastic job have changed."""
        changes = self._changes()
        told = [self._awaited(statuses)]
        if changes and changes[-1].epoch:
            newest = changes[-1]
            told.append(f"epoch {newest.epoch}, {newest.world} ranks: {newest.why}")
        return "\n".join(filter(None, told))

    def _awaited(self, statuses: dict[int, Status | None]) -> str:
        """At this moment, or else in the last steps."""
        running = _running(statuses)
        if not any(_is_held_up(status) for status in running.values()):
            return _average_caption(self._by_place(statuses))
        stopped = [rank for rank in running if self._is_stopped(rank)]
        if stopped:
            return f"the others wait for rank {stopped[0]}, which is stopped"
        busy = {r: s for r, s in running.items() if s.activity is not Activity.WAITING}
        if not busy:
            return ""
        rank = min(busy, key=lambda rank: _place_in_line(busy[rank]))
        words, for_s = WORDS[busy[rank].activity], _for_s(busy[rank])
        since = f" for {for_s:.0f} s" if busy[rank].since_ns else ""
        return f"the others wait for rank {rank}, {words}{since}"

    def _by_place(self, statuses: dict[int, Status | None]) -> dict[int, Status | None]:
        """Ranks of an elastic job name each other by rank; rows have the places of their files."""
        changes = self._changes()
        if not changes:
            return statuses
        place_of = changes[-1].place_of
        return {
            rank: replace(s, last_rank=place_of(s.last_rank)) if s and s.last_rank >= 0 else s
            for rank, s in statuses.items()
        }

    def _is_stopped(self, rank: int) -> bool:
        """By its process: what it recorded last may be that it waits itself."""
        with contextlib.suppress(OSError, RecordsError):
            info = read_info(self._folder.events(rank))
            if info.host == host_name():
                return process_state(info.pid, 0) is ProcessState.STOPPED
        return False

    def render(self, rows: int = sys.maxsize) -> Table:
        """Return a table for rich, at most 80 columns wide and so many ranks long."""
        from rich.table import Table

        statuses = self.statuses()
        standings = self._standings(statuses)
        caption = self._caption(self._training(statuses))
        if not any(statuses.values()):
            caption = "recorded from the first Paceline DDP on (torch's DDP: --patch)"
        table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
        for name, width in (("rank", 4), ("step", 7), ("samples/s", 9), ("loss", 9)):
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        table.add_column("waiting", justify="right", no_wrap=True, min_width=7)
        table.add_column("memory", justify="right", no_wrap=True, min_width=8)
        table.add_column("now", no_wrap=True, overflow="ellipsis", min_width=12)
        shown = list(statuses)[: rows if len(statuses) <= rows else max(1, rows - 1)]
        for rank in shown:
            table.add_row(str(rank), *_cells(statuses[rank], standings[rank]))
        if len(shown) < len(statuses):  # what is below the terminal's end would not be seen
            table.add_row("", *[""] * 5, f"{len(statuses) - len(shown)} more ranks")
        return table

    def line(self) -> str:
        """Return the run in one plain line."""
        statuses = self._training(self.statuses())
        known = [status for status in statuses.values() if status is not None]
        if not known:
            return "no rank has begun to train"
        parts = [f"step {_range([status.step for status in known])}"]
        rate = sum(status.samples_per_s for status in known)
        if rate:
            parts.append(f"{_short(rate)} samples/s")
        losses = [status.loss for status in known if not math.isnan(status.loss)]
        if losses:
            parts.append(f"loss {sum(losses) / len(losses):.4g}")
        parts.append(f"waiting {max(status.waiting_share for status in known):.0%}")
        parts.append(f"memory {size_text(sum(status.rss_bytes for status in known))}")
        parts.append(_counted(known))
        if caption := self._caption(statuses):
            parts += caption.splitlines()
        return ", ".join(parts)


def _cells(status: Status | None, standing: Standing) -> list[str]:
    if standing is not Standing.MEMBER:
        step = str(status.step) if status is not None and status.step else ""
        return [step, "", "", "", "", "left" if standing is Standing.LEFT else "spare, waits"]
    if status is None:
        return ["", "", "", "", "", "nothing yet"]
    return [
        str(status.step),
        _short(status.samples_per_s) if status.samples_per_s else "",
        "" if math.isnan(status.loss) else f"{status.loss:.4g}",
        f"{status.waiting_share:.0%}" if status.step > 1 else "",
        size_text(status.rss_bytes) if status.rss_bytes else "",
        _now(status),
    ]


def _now(status: Status) -> str:
    if status.activity is Activity.ENDED:
        return f"ended: {status.detail.splitlines()[0]}" if status.detail else "ended"
    words, for_s = _DOING[status.activity], _for_s(status)
    return f"{words} {for_s:.0f} s" if for_s > QUIET_S else words


def _for_s(status: Status) -> float:
    """How long it does what it does; 0 if that is not known."""
    return (time.perf_counter_ns() - status.since_ns) / 1e9 if status.since_ns else 0.0


def _place_in_line(status: Status) -> tuple[int, float]:
    """Sorts ranks: busy for long first, then those of other hosts, whose clocks differ."""
    for_s = _for_s(status)
    return (0 if for_s > _HELD_UP_S else 1 if not status.since_ns else 2), -for_s


def _running(statuses: dict[int, Status | None]) -> dict[int, Status]:
    known = {rank: status for rank, status in statuses.items() if status is not None}
    return {rank: s for rank, s in known.items() if s.activity is not Activity.ENDED}


def _is_held_up(status: Status) -> bool:
    return status.activity is Activity.WAITING and _for_s(status) > _HELD_UP_S


def awaited_rank(statuses: dict[int, Status | None]) -> int | None:
    """The rank that the others waited for in the last steps, if they lose time by it.

    Most ranks have to name it, and no other may wait less than it does: who came last in the newest
    step is an accident, unless it is so in the mean of the last steps, too. None also if nobody
    waits long enough to mention it.
    """
    known = _running(statuses)
    votes = Counter(status.last_rank for status in known.values() if status.last_rank >= 0)
    if not votes or len(known) < 2:
        return None
    rank, count = votes.most_common(1)[0]
    waiting = [status.waiting_share for other, status in known.items() if other != rank]
    if 2 * count <= len(known) or not waiting or max(waiting) < _WORTH_WAITING:
        return None
    own = known[rank].waiting_share if rank in known else 0.0
    return rank if own <= min(waiting) else None


def _average_caption(statuses: dict[int, Status | None]) -> str:
    rank = awaited_rank(statuses)
    if rank is None:
        return ""
    lost = max(s.waiting_share for r, s in _running(statuses).items() if r != rank)
    return f"the others wait for rank {rank}, up to {lost:.0%} of their time"


def _counted(known: Sequence[Status]) -> str:
    """What ranks do, in words: ``3 waits, 1 input``."""
    counts = Counter(_DOING[status.activity] for status in known)
    return ", ".join(f"{count} {words}" for words, count in counts.most_common())


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _short(number: float) -> str:
    """For example 980, 12.3k, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"
