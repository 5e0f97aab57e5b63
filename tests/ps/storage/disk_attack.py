"""Play ``disk_story.py`` with a fault at operation k, for some k or for every one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.ps.storage.disk_story import Scene, Told, play, prove
from tests.ps.storage.faulty_disk import Fault, FaultyDisk, ForgetfulDisk, Kept

_KILLS = {Fault.KILLED_BEFORE, Fault.KILLED_INSIDE, Fault.KILLED_AFTER, Fault.POWER_CUT}


def attack(
    directory: Path, saved: Path, fault: Fault | Kept, first: int, every: int, fsync: bool = True
) -> int:
    """Let operations first, first + every, ... fail until there is none; returns how many did."""
    for fired, at in enumerate(range(first, 1 << 20, every)):
        scene = Scene(directory / str(at), saved, fsync)
        try:
            if not _has_failed(scene, fault, at):
                return fired
        except AssertionError as error:
            raise AssertionError(f"{fault} at operation {at}: {error}") from error
        finally:
            shutil.rmtree(scene.root)
    raise AssertionError("it does not end")


def _has_failed(scene: Scene, fault: Fault | Kept, at: int) -> bool:
    """Play once; False if the story ended before operation ``at``."""
    if isinstance(fault, Fault):
        told = play(scene, FaultyDisk(at, fault))
        prove(scene, told)
        return _fired(told, fault, at)
    rest = replace(scene, root=scene.root.with_name(f"{at}-left"))
    told = play(scene, ForgetfulDisk(at, scene.root, rest.root, fault))
    if not _fired(told, Fault.POWER_CUT, at):
        prove(scene, told)
        return False
    prove(rest, told)
    shutil.rmtree(rest.root)
    return True


def _fired(told: Told, fault: Fault, at: int) -> bool:
    has_ended = told.operations > 0
    return not has_ended if fault in _KILLS else told.operations >= at
