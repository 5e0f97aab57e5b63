"""Operations of a parameter server on its files fail, each once, in every way.

Attacked: journal, snapshots, saves and loads (the story is in ``tests/ps/storage/disk_story.py``).
Its operation k fails with ENOSPC, EIO or EROFS, once or from then on; is cut in half; or the
process is killed before, in or after it; or the machine stops, and what was not synced is lost. For
every third k until the story ends by itself; for every k with PACELINE_LONG set.

Must hold: the server starts again; every acknowledged push is there once, others at most once; what
was refused changed nothing; the client goes on and comes to the exact sums; the last save that was
acknowledged can be loaded; nothing is left behind.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ps.storage.disk_attack import attack
from tests.ps.storage.disk_story import make_save
from tests.ps.storage.faulty_disk import Fault, Kept

FAULTS = [fault for fault in Fault if fault is not Fault.POWER_CUT]
ATTACKED: list[Fault | Kept] = [*FAULTS, *Kept]


@pytest.mark.parametrize("fault", ATTACKED, ids=lambda fault: fault.name)
def test_every_operation(fault: Fault | Kept, tmp_path: Path) -> None:
    every = 1 if os.environ.get("PACELINE_LONG") else 3
    first = 1 + ATTACKED.index(fault) % every  # not the same k for each fault
    fired = attack(tmp_path, make_save(tmp_path / "saved"), fault, first, every)
    assert fired > 100 // every, "the story has as many operations"
