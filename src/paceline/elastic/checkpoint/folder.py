"""Where checkpoints lie: one folder for each step, whole or not there at all.

Used by the writer and the reader beside it. Knows names, renames and deletes; not tensors.

[Note: atomic]
A checkpoint is written into ``.saving-<step>-<random>``, all of it is on the disk (fsync), and only
then it is renamed to ``step-<step>``. So a folder with such a name is whole, whenever the writer or
the machine may have died. What is older than the last few is renamed to ``.deleting-...`` before it
is deleted. Whatever such folder a dead process has left is deleted by the next save.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError

FORMAT = 1
MAGIC = "paceline elastic state"
DESCRIPTION = "state.json"
MAX_DESCRIPTION_BYTES = 256 << 20
_STEP = re.compile(r"step-(\d{1,18})")
_LEFTOVER = re.compile(r"\.(saving|deleting)-.*")


def step_folder(parent: Path, step: int) -> Path:
    """The name of a whole checkpoint."""
    return parent / f"step-{step:09d}"


def new_folder(parent: Path, step: int) -> Path:
    """Make a folder to write a checkpoint into; only this user can read it."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".saving-{step:09d}-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    return folder


def publish(folder: Path, parent: Path, step: int) -> Path:
    """Give a written checkpoint its name: [Note: atomic]."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    target = step_folder(parent, step)
    if target.exists():  # of a run before, which went another way from here
        _delete(target)
    folder.rename(target)
    _sync(parent)
    return target


def clean(parent: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints, and what dead processes have left."""
    for folder in steps_in(parent)[:-keep]:
        _delete(folder)
    for path in parent.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def steps_in(parent: Path) -> list[Path]:
    """All whole checkpoints, oldest first."""
    with contextlib.suppress(OSError):
        found = [(int(match[1]), path) for path in parent.iterdir()
                 if (match := _STEP.fullmatch(path.name))]  # fmt: skip
        return [path for _, path in sorted(found)]
    return []


def find(path: Path) -> Path | None:
    """The checkpoint that a path means: itself, or the latest in it; None if there is none."""
    if (path / DESCRIPTION).exists():
        return path
    return next(iter(reversed(steps_in(path))), None)


def write_description(folder: Path, facts: dict[str, Any]) -> None:
    """Write what is not in tensors."""
    text = json.dumps({"magic": MAGIC, "format": FORMAT, **facts})
    (folder / DESCRIPTION).write_text(text)


def read_description(folder: Path) -> dict[str, Any]:
    """Read it.

    Raises:
        CheckpointError: It is not one, is damaged, or is of a newer version.
    """
    path = folder / DESCRIPTION
    try:
        if path.stat().st_size > MAX_DESCRIPTION_BYTES:
            raise CheckpointError(f"{path} is larger than any description of a state can be")
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint of an elastic state, or is damaged ({error}): pass the "
            "path that state.save() was given"
        ) from None
    if not isinstance(facts, dict) or facts.get("magic") != MAGIC:
        raise CheckpointError(f"{path} was not written by state.save(): load it with what wrote it")
    if facts.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {facts.get('format')!r}, written by Paceline "
            f"{facts.get('paceline')!r}, and this version reads format {FORMAT}: install the "
            "version that wrote it, or a newer one"
        )
    return facts


def _delete(folder: Path) -> None:
    doomed = folder.with_name(f".deleting-{folder.name}-{secrets.token_hex(6)}")
    with contextlib.suppress(FileNotFoundError):  # another process deletes it
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
