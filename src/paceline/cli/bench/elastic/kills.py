"""Kills ranks of a running contender, one after the other, and measures how it goes on.

What a kill is followed by is read from the notes of the ranks, all on one clock. Pure but for the
killing and the reading.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.kernel import descendants

SETTLED_STEPS = 10
_LOOK_S = 0.02


@dataclass(frozen=True)
class StepNote:
    """A committed step of a rank."""

    at_s: float
    step: int
    epoch: int
    rank: int
    pid: int


@dataclass(frozen=True)
class MeasuredKill:
    """One kill, and what followed.

    Attributes:
        at_s: When.
        pid: Of whom.
        next_step_s: Until some rank finished a step in a later epoch, so one that began after it.
        replaced_s: Until the first step of the new process.
        repeated: Steps that were committed before, and done again.
    """

    at_s: float
    pid: int
    next_step_s: float
    replaced_s: float
    repeated: int


class GaveUpError(Exception):
    """A contender did not go on."""


def read_notes(folder: Path) -> list[StepNote]:
    """All notes, by time."""
    found = []
    for path in folder.glob("notes-*"):
        with contextlib.suppress(ValueError, OSError):
            pid = int(path.name.removeprefix("notes-"))
            lines = path.read_text().splitlines(keepends=True)
            found += [StepNote(pid=pid, **json.loads(li)) for li in lines if li.endswith("\n")]
    return sorted(found, key=lambda note: note.at_s)


def disturb(
    launcher: subprocess.Popen[bytes],
    folder: Path,
    ranks: int,
    kills: int,
    limit_s: float,
    on_kill: Callable[[MeasuredKill], None],
) -> list[MeasuredKill]:
    """Kill so many ranks; each when all are there and have trained since the last.

    Raises:
        GaveUpError: It did not go on in time; what was found until then is with ``on_kill``.
    """
    draw, found = random.Random(0), []
    after_s = 0.0
    for number in range(kills):
        alive = _wait_settled(launcher, folder, ranks, after_s, limit_s)
        time.sleep(draw.uniform(0.2, 0.6))
        victim = sorted(alive)[number % ranks]  # each rank in turn, rank 0 too
        at_s = time.monotonic()
        os.kill(alive[victim], signal.SIGKILL)
        kill = _wait_followed(launcher, folder, at_s, alive, victim, limit_s)
        found.append(kill)
        on_kill(kill)
        after_s = at_s + kill.replaced_s
    return found


def _wait_settled(
    launcher: subprocess.Popen[bytes], folder: Path, ranks: int, after_s: float, limit_s: float
) -> dict[int, int]:
    """Wait until all ranks have done some steps; return the processes of the ranks."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and launcher.poll() is None:
        time.sleep(_LOOK_S)
        alive = descendants(launcher.pid)
        notes = [n for n in read_notes(folder) if n.at_s > after_s and n.pid in alive]
        newest = max((n.epoch for n in notes), default=0)
        counts: dict[int, int] = {}
        for note in notes:
            if note.epoch == newest:
                counts[note.pid] = counts.get(note.pid, 0) + 1
        if len(counts) == ranks and min(counts.values()) >= SETTLED_STEPS:
            return {n.rank: n.pid for n in notes if n.epoch == newest}
    raise GaveUpError(_how(launcher, f"there were never {ranks} ranks that trained", limit_s))


def _wait_followed(
    launcher: subprocess.Popen[bytes],
    folder: Path,
    at_s: float,
    alive: dict[int, int],
    victim: int,
    limit_s: float,
) -> MeasuredKill:
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and launcher.poll() is None:
        time.sleep(_LOOK_S)
        kill = what_followed(read_notes(folder), at_s, set(alive.values()), alive[victim])
        if kill is not None:
            return kill
    raise GaveUpError(_how(launcher, "it did not go on after a kill", limit_s))


def what_followed(
    notes: list[StepNote], at_s: float, alive: set[int], victim: int
) -> MeasuredKill | None:
    """What came after a kill; None as long as not all of it is there."""
    before = [n for n in notes if n.at_s <= at_s]
    epoch = max((n.epoch for n in before), default=0)
    after = [n for n in notes if n.at_s > at_s and n.epoch > epoch]
    new = [n for n in after if n.pid not in alive]
    if not after or not new:
        return None
    reached = max((n.step for n in notes if n.epoch == epoch and n.pid != victim), default=0)
    return MeasuredKill(
        at_s,
        victim,
        after[0].at_s - at_s,
        new[0].at_s - at_s,
        max(0, reached + 1 - after[0].step),
    )


def _how(launcher: subprocess.Popen[bytes], what: str, limit_s: float) -> str:
    code = launcher.poll()
    return f"{what} in {limit_s:g} s" if code is None else f"{what}; it ended with {code}"


def samples_per_s(notes: list[StepNote], batch: int, every_s: float) -> list[tuple[float, float]]:
    """The speed over time: from the begin of a bin, so many samples a second."""
    firsts: dict[tuple[int, int], float] = {}
    for note in notes:
        firsts.setdefault((note.epoch, note.step), note.at_s)
    if not firsts:
        return []
    times = sorted(firsts.values())
    bins = [0] * (int((times[-1] - times[0]) / every_s) + 1)
    for at_s in times:
        bins[int((at_s - times[0]) / every_s)] += 1
    return [(times[0] + n * every_s, c * batch / every_s) for n, c in enumerate(bins)]
