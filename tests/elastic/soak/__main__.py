"""``make soak``: kills at random moments. What failed is printed with what repeats it.

Every piece is a job of its own with other settings. After each piece: no committed step was lost,
every sample came exactly once per epoch, all ranks hold the same bits, and neither the launcher,
its fork server nor the rank that was never killed has grown.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.elastic.soak.check import check_notes, read_notes
from tests.elastic.soak.job import RANKS, Piece, SoakJob

UNITS = ("kB", "descriptors", "threads")
# What a process may have more of at the end of a piece than at its beginning, and more for each
# kill: allocators and caches settle, and then a kill costs nothing that stays.
MOST = {"kB": 8_192, "descriptors": 4, "threads": 4}
PER_KILL = {"kB": 24.0, "descriptors": 0.02, "threads": 0.0}
MORE_PROCESSES = 2
OPTIONS = ((), ("--hold", "60"), ("--spares", "1"), ("--spares", "1", "--hold", "60"))


def make_piece(seed: int, seconds: float) -> Piece:
    """Everything about a piece follows from its seed."""
    draw = random.Random(seed)
    return Piece(
        seed,
        seconds,
        draw.choice(["gloo", "paceline"]),
        draw.choice(OPTIONS),
        draw.choice([0, 0, 2]),
        draw.randrange(RANKS),
    )


def run_piece(piece: Piece) -> tuple[Counter[str], str]:
    """Run one; return how many ranks it killed, and what is wrong."""
    out = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    job = SoakJob(piece, out)
    wrong = job.run()
    steps = lost = 0
    if not wrong:
        try:
            found = check_notes(read_notes(out), RANKS)
            steps, lost = found.steps, found.lost
        except AssertionError as error:
            wrong = f"{error}"[:4000]
    growth = {name: usage.growth() for name, usage in job.usage.items()}
    processes = job.processes.growth()
    wrong += judge_growth(growth, processes, job.kills.total(), piece.workers)
    summary = {
        "seed": piece.seed,
        "seconds": round(time.monotonic() - job.began_s),
        "settings": piece.describe(),
        **job.kills,
        "kills": job.kills.total(),
        "steps": steps,
        "steps that only the dead had": lost,
        f"growth ({', '.join(UNITS)})": growth,
        "growth of processes": processes,
        "processes at most": max(job.processes.samples, default=(0,))[0],
        "wrong": wrong,
    }
    print(json.dumps(summary), flush=True)
    if wrong:
        print(f"kept in {out}; the last lines of the launcher:", flush=True)
        print((out / "launcher.txt").read_text()[-3000:], flush=True)
    else:
        shutil.rmtree(out)
    return job.kills, wrong


def judge_growth(
    growth: dict[str, tuple[int, ...]], processes: tuple[int, ...], kills: int, workers: int
) -> str:
    """Say what has grown more than it may, from the first third of a piece to its last."""
    wrong = ""
    if not processes or not all(growth.values()):
        return " nothing was measured: the piece is too short;"
    for name, grown in growth.items():
        for unit, value in zip(UNITS, grown, strict=True):
            slack = 8 * workers if unit != "kB" else 0
            if value > MOST[unit] + slack + PER_KILL[unit] * kills:
                wrong += f" {name}: {value} more {unit} after {kills} kills;"
    if processes[0] > MORE_PROCESSES + workers:
        wrong += f" {processes[0]} more processes;"
    return wrong


def main() -> int:
    """Run all pieces; 1 if one was wrong."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="in all (default: 600)")
    parser.add_argument("--pieces", type=int, default=6, help="jobs (default: 6)")
    parser.add_argument("--seed", type=int, help="of the first piece (default: from the clock)")
    args = parser.parse_args()
    first = int(time.time()) if args.seed is None else args.seed
    total: Counter[str] = Counter()
    failed = []
    for seed in range(first, first + args.pieces):
        kills, wrong = run_piece(make_piece(seed, args.seconds / args.pieces))
        total += kills
        failed += [seed] if wrong else []
    print(f"{total['SIGKILL']} kills, {total['SIGSTOP']} stops; {len(failed)} pieces failed")
    for seed in failed:
        each = args.seconds / args.pieces
        print(f"repeat: make soak SECONDS={each:g} PIECES=1 SEED={seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
