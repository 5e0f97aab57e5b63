"""What must hold after a piece of the soak, from the notes of all members."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES, BATCH = 480, 24

Note = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What a job has done."""

    steps: int
    lost: int


def read_notes(out: Path) -> dict[int, list[Note]]:
    """The lines of each member, in its order. The last line of one that was killed may be cut."""
    found: dict[int, list[Note]] = {}
    for path in out.glob("notes-*"):
        lines = path.read_text().splitlines(keepends=True)
        notes = [json.loads(line) for line in lines if line.endswith("\n")]
        found[int(path.name.removeprefix("notes-"))] = notes
    return found


def check_notes(notes: dict[int, list[Note]], world: int) -> Found:
    """Assert what is promised; return what was counted."""
    done = [n for lines in notes.values() for n in lines if n["kind"] == "done"]
    assert len(done) == world, f"{len(done)} of {world} ranks came to the end"
    assert len({(n["step"], n["digest"]) for n in done}) == 1, f"ranks differ at the end: {done}"
    steps = int(done[0]["step"])
    lost = _check_commits(notes, steps)
    _check_samples(notes, steps)
    return Found(steps, lost)


def _check_commits(notes: dict[int, list[Note]], steps: int) -> int:
    """No member that lives on commits a step that is done again; all that commit it agree."""
    commits: dict[int, list[Note]] = defaultdict(list)
    last: dict[int, int] = {}
    for member, lines in notes.items():
        numbers = [n["step"] for n in lines if n["kind"] == "commit"]
        assert numbers == sorted(set(numbers)), f"member {member} committed {numbers}"
        last[member] = max(numbers, default=0)
        for line in lines:
            if line["kind"] == "commit":
                commits[line["step"]].append(line)
    lost = 0
    for step, lines in commits.items():
        newest = max(line["epoch"] for line in lines)
        digests = {line["digest"] for line in lines if line["epoch"] == newest}
        assert len(digests) == 1, f"ranks differ after step {step}: {lines}"
        for line in lines:
            if line["epoch"] < newest:  # only the dead had it: nobody could know
                assert last[line["member"]] == step, f"step {step} was done again: {lines}"
                lost += 1
    assert set(commits) | {steps} >= set(range(1, steps)), "a step was never committed"
    return lost


def _check_samples(notes: dict[int, list[Note]], steps: int) -> None:
    """The attempt at each step that counts has a whole global batch; an epoch has all samples."""
    attempts: dict[int, dict[int, list[Note]]] = defaultdict(lambda: defaultdict(list))
    for lines in notes.values():
        for line in lines:
            if line["kind"] == "bring":
                attempts[line["step"]][line["epoch"]].append(line)
    per_epoch = SAMPLES // BATCH
    seen: dict[int, list[int]] = defaultdict(list)
    for step in range(1, steps + 1):
        parts = attempts[step][max(attempts[step])]
        world = parts[0]["place"][1]
        assert sorted(part["place"][0] for part in parts) == list(range(world)), (step, parts)
        where = [(step - 1) // per_epoch, (step - 1) % per_epoch]
        assert all(part["where"] == where for part in parts), (step, parts)
        batch = [sample for part in parts for sample in part["samples"]]
        assert len(batch) == len(set(batch)) == BATCH, (step, batch)
        seen[where[0]] += batch
    for epoch, samples in seen.items():
        assert len(samples) == len(set(samples)), f"a sample came twice in epoch {epoch}"
        if (epoch + 1) * per_epoch <= steps:
            assert len(samples) == SAMPLES, f"samples are missing in epoch {epoch}"
