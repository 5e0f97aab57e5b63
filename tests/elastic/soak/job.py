"""One piece of the soak: ``paceline run --elastic``, and somebody outside who kills its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch.kernel import descendants
from tests.elastic.soak.check import Note, read_notes

SCRIPT = Path(__file__).parent / "script.py"
RANKS = 4
STUCK_AFTER_S = 4.0
LATE_S = 180.0  # a job that does not get on for so long hangs
IN_A_ROW = 2  # kills of one slot before it has done a step again; the job would end after five


@dataclass(frozen=True)
class Piece:
    """What is varied."""

    seed: int
    seconds: float
    backend: str
    options: tuple[str, ...]
    workers: int
    kept: int  # the slot whose process is never killed: it must not grow

    def describe(self) -> str:
        words = " ".join(self.options) or "neither hold nor spares"
        return f"{self.backend}, {words}, {self.workers} workers, slot {self.kept} is spared"


@dataclass
class Usage:
    """What a process has, over time: kilobytes, descriptors, threads; and the job's processes."""

    samples: list[tuple[int, int, int]] = field(default_factory=list)

    def look(self, pid: int) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            files = len(os.listdir(f"/proc/{pid}/fd"))
            self.samples.append((int(status["RssAnon"].split()[0]), files, int(status["Threads"])))

    def growth(self) -> tuple[int, int, int]:
        """From the first third to the last: of the least that was seen in each."""
        third = len(self.samples) // 3
        if not third:
            return 0, 0, 0
        first, last = self.samples[:third], self.samples[-third:]
        return tuple(min(s[i] for s in last) - min(s[i] for s in first) for i in range(3))  # type: ignore[return-value]


class SoakJob:
    """Runs a piece; afterwards ``kills`` says what was done."""

    def __init__(self, piece: Piece, out: Path) -> None:
        self._piece = piece
        self._out = out
        self._random = random.Random(piece.seed)
        self._pids: dict[int, tuple[int, int]] = {}  # of members: pid and slot
        self._in_a_row: Counter[int] = Counter()
        self._step_at_kill: dict[int, int] = {}
        self.kills: Counter[str] = Counter()
        self.usage = {"launcher": Usage(), "fork server": Usage(), "survivor": Usage()}
        self.processes: list[int] = []
        self._server = 0
        self.began_s = time.monotonic()

    def run(self) -> str:
        """Run it; return what went wrong."""
        piece = self._piece
        order = {"backend": piece.backend, "workers": piece.workers, "pause_s": 0.01}
        command = [sys.executable, "-m", "paceline", "run", "--elastic", "-n", str(RANKS)]
        command += ["--stuck-after", str(STUCK_AFTER_S), "--tee", "0", *piece.options]
        command += ["--run-dir", str(self._out / "run"), str(SCRIPT), str(self._out)]
        with (self._out / "launcher.txt").open("w") as log:
            launcher = subprocess.Popen([*command, json.dumps(order)], stdout=log, stderr=log)
        try:
            self._disturb(launcher)
            code = launcher.wait(LATE_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait()
        return f"the launcher has ended with {code}" if code else ""

    def _disturb(self, launcher: subprocess.Popen[bytes]) -> None:
        end_s = time.monotonic() + self._piece.seconds
        moved_s, moved_step = time.monotonic(), 0
        while launcher.poll() is None and time.monotonic() < end_s:
            time.sleep(self._random.uniform(0.02, 0.6))
            notes = read_notes(self._out)
            step = max((s for lines in notes.values() if (s := _step(lines))), default=0)
            if step > moved_step:
                moved_s, moved_step = time.monotonic(), step
            if time.monotonic() - moved_s > LATE_S:
                raise TimeoutError(f"no step after step {step} for {LATE_S:g} s")
            if step > 5:
                self._look(launcher.pid, notes)
                self._strike(launcher.pid, notes)
        step = max(_step(lines) for lines in read_notes(self._out).values())
        (self._out / "draft").write_text(str(step + 60))
        os.replace(self._out / "draft", self._out / "last")

    def _look(self, launcher: int, notes: dict[int, list[Note]]) -> None:
        below = descendants(launcher)
        self.processes.append(len(below))
        self.usage["launcher"].look(launcher)
        self._server = self._server or min(below - {n[0]["pid"] for n in notes.values() if n})
        self.usage["fork server"].look(self._server)
        for lines in notes.values():
            if lines and lines[0]["slot"] == self._piece.kept:
                self.usage["survivor"].look(lines[0]["pid"])

    def _strike(self, launcher: int, notes: dict[int, list[Note]]) -> None:
        alive = descendants(launcher)
        targets = []
        for lines in notes.values():
            if not lines or lines[0]["pid"] not in alive or lines[-1]["kind"] == "done":
                continue
            slot, step = int(lines[0]["slot"]), _step(lines)
            if step > self._step_at_kill.get(slot, -1):
                self._in_a_row[slot] = 0
            if slot != self._piece.kept and self._in_a_row[slot] < IN_A_ROW:
                targets.append((int(lines[0]["pid"]), slot, step))
        number = 2 if self._random.random() < 0.1 else 1
        for pid, slot, step in self._random.sample(targets, min(number, len(targets))):
            what = signal.SIGSTOP if self._random.random() < 0.05 else signal.SIGKILL
            if step == 0 and self._random.random() < 0.7:
                continue  # mostly those that train
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)
                self.kills[what.name] += 1
            self._in_a_row[slot] += 1
            self._step_at_kill[slot] = max(step, self._step_at_kill.get(slot, 0))


def _step(lines: list[Note]) -> int:
    return max((n["step"] for n in lines if n["kind"] == "commit"), default=0)
