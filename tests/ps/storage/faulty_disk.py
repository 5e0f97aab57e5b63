"""Disks that fail at their k-th operation, and machines that stop there."""

from __future__ import annotations

import enum
import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from paceline.ps.storage.files import Disk

T = TypeVar("T")


class Fault(enum.Enum):
    """What becomes of operation k, and of those after it."""

    FULL = "from k on, what needs room fails"
    FULL_INSIDE = "half of write k is written, then the disk is full"
    FAILS_ONCE = "k fails, later ones do not"
    FAILS = "from k on everything fails"
    READ_ONLY = "from k on the file system is read-only"
    KILLED_BEFORE = "the process is killed before k"
    KILLED_INSIDE = "it is killed when half of write k is written"
    KILLED_AFTER = "it is killed after k"
    POWER_CUT = "the machine stops before k, and what was not synced is lost"


_ERRORS = {
    Fault.FULL: errno.ENOSPC,
    Fault.FULL_INSIDE: errno.ENOSPC,
    Fault.FAILS_ONCE: errno.EIO,
    Fault.FAILS: errno.EIO,
    Fault.READ_ONLY: errno.EROFS,
}
_STAYS = {Fault.FULL, Fault.FULL_INSIDE, Fault.FAILS, Fault.READ_ONLY}
_ONLY_ROOM = {Fault.FULL, Fault.FULL_INSIDE}


class FaultyDisk(Disk):
    """Counts operations from 1, and does ``fault`` at ``at``.

    Syncs are counted, and not done: nobody stops this machine.
    """

    def __init__(self, at: int, fault: Fault) -> None:
        self.at = at
        self.fault = fault
        self.count = 0

    @property
    def has_fired(self) -> bool:
        return self.count >= self.at

    def create(self, path: Path) -> int:
        self._before(needs_room=True)
        return self._after(super().create(path))

    def open_end(self, path: Path) -> int:
        self._before()
        return self._after(super().open_end(path))

    def write(self, descriptor: int, pieces: Sequence[bytes | memoryview]) -> int:
        if self._is_now(Fault.FULL_INSIDE, Fault.KILLED_INSIDE):
            data = b"".join(pieces)
            written = os.write(descriptor, data[: len(data) // 2])
            if self.fault is Fault.KILLED_INSIDE:
                _die()
            self.count += 1
            return written
        self._before(needs_room=True)
        return self._after(super().write(descriptor, pieces))

    def write_at(self, descriptor: int, data: bytes, offset: int) -> int:
        self._before(needs_room=True)
        return self._after(super().write_at(descriptor, data, offset))

    def truncate(self, descriptor: int, size: int) -> None:
        self._before()
        self._after(super().truncate(descriptor, size))

    def sync(self, descriptor: int) -> None:
        self._before(needs_room=True)
        self._after(None)

    def rename(self, path: Path, to: Path) -> None:
        self._before()
        self._after(super().rename(path, to))

    def unlink(self, path: Path) -> None:
        self._before()
        self._after(super().unlink(path))

    def make_directory(self, path: Path) -> None:
        self._before(needs_room=True)
        self._after(super().make_directory(path))

    def sync_directory(self, path: Path) -> None:
        self._before()
        self._after(None)

    def _is_now(self, *faults: Fault) -> bool:
        return self.count + 1 == self.at and self.fault in faults

    def _before(self, needs_room: bool = False) -> None:
        self.count += 1
        is_now = self.count == self.at or (self.count > self.at and self.fault in _STAYS)
        if not is_now:
            return
        if self.fault in (Fault.KILLED_BEFORE, Fault.KILLED_INSIDE):
            _die()
        if self.fault is Fault.POWER_CUT:
            self._cut()
        if self.fault in _ERRORS and (needs_room or self.fault not in _ONLY_ROOM):
            number = _ERRORS[self.fault]
            raise OSError(number, os.strerror(number))

    def _after(self, value: T) -> T:
        if self.count == self.at and self.fault is Fault.KILLED_AFTER:
            _die()
        return value

    def _cut(self) -> None:
        raise AssertionError("only a ForgetfulDisk")


class Kept(enum.Enum):
    """What a machine that stops has kept beyond what was synced."""

    SYNCED = "nothing"
    NAMES = "all names, as file systems with a journal often do"
    HALF = "all names, and half of the bytes"
    ZEROS = "all names and lengths, with zeros for the bytes"


class ForgetfulDisk(FaultyDisk):
    """At the power cut, leaves a copy of the directory with what was synced, and little else.

    Args:
        at: See :class:`FaultyDisk`.
        root: The directory.
        copy: Where what is left of it is put.
        kept: What was not synced, and is left nevertheless.
    """

    def __init__(self, at: int, root: Path, copy: Path, kept: Kept) -> None:
        super().__init__(at, Fault.POWER_CUT)
        self._root = root
        self._copy = copy
        self._kept = kept
        self._data: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}
        self._open: dict[int, int] = {}  # by inode, so that none gets a second life

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._open[os.fstat(descriptor).st_ino] = os.dup(descriptor)
        return descriptor

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._data[os.fstat(descriptor).st_ino] = _content(descriptor)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._names[path] = _names(path)

    def _cut(self) -> None:
        self._leave(self._root, self._copy)
        _die()

    def _leave(self, directory: Path, copy: Path) -> None:
        copy.mkdir(parents=True)
        names = self._names.get(directory, {})
        if self._kept is not Kept.SYNCED and directory.is_dir():
            names = _names(directory)
        for name, inode in names.items():
            if (directory / name).is_dir():
                self._leave(directory / name, copy / name)
            else:
                (copy / name).write_bytes(self._left_of(inode))

    def _left_of(self, inode: int) -> bytes:
        synced = self._data.get(inode, b"")
        if self._kept not in (Kept.HALF, Kept.ZEROS) or inode not in self._open:
            return synced
        rest = _content(self._open[inode])[len(synced) :]
        return synced + (rest[: len(rest) // 2] if self._kept is Kept.HALF else bytes(len(rest)))


def _content(descriptor: int) -> bytes:
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()


def _names(directory: Path) -> dict[str, int]:
    return {each.name: each.stat().st_ino for each in directory.iterdir()}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
