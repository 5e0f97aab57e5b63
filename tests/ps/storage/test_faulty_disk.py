"""A disk that fails at operation k, a process or a machine that stops there: nothing is lost.

Here are some k; ``tests/attack/test_disk.py`` has every one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ps.storage.disk_attack import attack
from tests.ps.storage.disk_story import STORY, Scene, make_save, play, prove
from tests.ps.storage.faulty_disk import Fault, FaultyDisk, Kept

FAULTS = [fault for fault in Fault if fault is not Fault.POWER_CUT]
EVERY = 19


def test_without_a_fault(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "root", make_save(tmp_path / "saved"), fsync=True)
    told = play(scene, FaultyDisk(1 << 30, Fault.FULL))
    prove(scene, told)
    assert told.operations > 150
    refused = {STORY[place].name for place, outcome in told.outcomes.items() if outcome != "done"}
    assert refused == {"WRONG"}


@pytest.mark.parametrize("fault", [*FAULTS, *Kept], ids=lambda fault: fault.name)
def test_some_operations(fault: Fault | Kept, tmp_path: Path) -> None:
    first = 1 + [*FAULTS, *Kept].index(fault)
    assert attack(tmp_path, make_save(tmp_path / "saved"), fault, first, EVERY) > 5


@pytest.mark.parametrize("fault", [Fault.FULL_INSIDE, Fault.KILLED_INSIDE], ids=lambda f: f.name)
def test_a_journal_that_is_not_synced(fault: Fault, tmp_path: Path) -> None:
    """Survives the process all the same."""
    saved = make_save(tmp_path / "saved")
    assert attack(tmp_path, saved, fault, 5, EVERY, fsync=False) > 3
