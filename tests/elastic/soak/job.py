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

SCRIPT = Path(__file__).parent / "script.py"
RANKS = 4
STUCK_AFTER_S = 4.0
LATE_S = 180.0  # a job that does not get on for so long hangs
IN_A_ROW = 2  # kills of one slot before it has done a step again; the job would end after five
PAUSE_S = (0.02, 0.4)  # between two strikes, at least and at most


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
class Seen:
    """A member, as far as it has been read of: notes are long, and each line is read once."""

    path: Path
    offset: int = 0
    pid: int = 0
    slot: int = -1
    step: int = 0
    is_done: bool = False

    def read(self) -> None:
        """Read what is new."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            note = json.loads(line)
            if note["kind"] == "begin":
                self.pid, self.slot = int(note["pid"]), int(note["slot"])
            elif note["kind"] == "commit":
                self.step = int(note["step"])
            self.is_done = note["kind"] == "done"


@dataclass
class Usage:
    """What a process has, over time: kilobytes, descriptors, threads."""

    samples: list[tuple[int, ...]] = field(default_factory=list)

    def look(self, pid: int) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            files = len(os.listdir(f"/proc/{pid}/fd"))
            self.samples.append((int(status["RssAnon"].split()[0]), files, int(status["Threads"])))

    def growth(self) -> tuple[int, ...]:
        """From the first third to the last: of the least that was seen in each."""
        third = len(self.samples) // 3
        if not third:
            return ()
        first, last = self.samples[:third], self.samples[-third:]
        return tuple(
            min(late) - min(early)
            for early, late in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True)
        )


class SoakJob:
    """Runs a piece; afterwards ``kills`` says what was done."""

    def __init__(self, piece: Piece, out: Path) -> None:
        self._piece = piece
        self._out = out
        self._random = random.Random(piece.seed)
        self._seen: dict[str, Seen] = {}
        self._in_a_row: Counter[int] = Counter()
        self._step_at_kill: dict[int, int] = {}
        self.kills: Counter[str] = Counter()
        self.usage = {"launcher": Usage(), "fork server": Usage(), "survivor": Usage()}
        self.processes = Usage()
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
            time.sleep(self._random.uniform(*PAUSE_S))
            step = self._read()
            if step > moved_step:
                moved_s, moved_step = time.monotonic(), step
            if time.monotonic() - moved_s > LATE_S:
                raise TimeoutError(f"no step after step {step} for {LATE_S:g} s")
            if step > 5:
                alive = descendants(launcher.pid)
                self._look(launcher.pid, alive)
                self._strike(alive)
        (self._out / "draft").write_text(str(self._read() + 60))
        os.replace(self._out / "draft", self._out / "last")

    def _read(self) -> int:
        """Read what members have noted; return the last step that any has committed."""
        for path in self._out.glob("notes-*"):
            self._seen.setdefault(path.name, Seen(path)).read()
        return max((each.step for each in self._seen.values()), default=0)

    def _look(self, launcher: int, alive: set[int]) -> None:
        self.processes.samples.append((len(alive),))
        self.usage["launcher"].look(launcher)
        self._server = self._server or min(alive - {each.pid for each in self._seen.values()})
        self.usage["fork server"].look(self._server)
        for each in self._seen.values():
            if each.slot == self._piece.kept:
                self.usage["survivor"].look(each.pid)

    def _strike(self, alive: set[int]) -> None:
        targets = []
        for each in self._seen.values():
            if each.pid not in alive or each.is_done:
                continue
            if each.step > self._step_at_kill.get(each.slot, -1):
                self._in_a_row[each.slot] = 0
            if each.slot != self._piece.kept and self._in_a_row[each.slot] < IN_A_ROW:
                targets.append(each)
        number = 2 if self._random.random() < 0.1 else 1
        for each in self._random.sample(targets, min(number, len(targets))):
            what = signal.SIGSTOP if self._random.random() < 0.05 else signal.SIGKILL
            if each.step == 0 and self._random.random() < 0.7:
                continue  # mostly those that train
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, what)
                self.kills[what.name] += 1
            self._in_a_row[each.slot] += 1
            self._step_at_kill[each.slot] = max(each.step, self._step_at_kill.get(each.slot, 0))
