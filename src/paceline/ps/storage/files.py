"""Every operation on the files of a server that changes something, in one place.

Called by journal, snapshots, saves and ``ps/storage/durable.py``, always as ``files.disk``, so that
tests can put a disk there that fails at its k-th operation (``tests/ps/storage/faulty_disk.py``).
Must not know what is in a file.

[Note: what survives what]
Written bytes survive the process (they are the kernel's), not the machine. What must survive the
machine is synced, the file first and then the directory that has its name: ``replace`` does both,
so that under a name there is the whole old file or the whole new one, whenever the machine stops.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

TEMPORARY = ".partial"
_PIECE = 1 << 26  # bytes of one write
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


class Disk:
    """The file system as it is. All methods raise ``OSError``."""

    def create(self, path: Path) -> int:
        """Open a new file for writing, for this user only; an old one is emptied."""
        return os.open(path, _FLAGS | os.O_TRUNC, 0o600)

    def open_end(self, path: Path) -> int:
        """Open a file to append to it."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, descriptor: int, pieces: Sequence[bytes | memoryview]) -> int:
        """Write as much of it as the kernel takes at once; returns how much that was."""
        return os.writev(descriptor, pieces)

    def write_at(self, descriptor: int, data: bytes, offset: int) -> int:
        """Write in the middle of a file."""
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Return when the file's data are on disk."""
        os.fdatasync(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file its name."""
        os.rename(path, to)

    def unlink(self, path: Path) -> None:
        """Delete a file; it may be gone already."""
        path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> None:
        """Make one directory, whose parent is there."""
        path.mkdir(mode=0o700, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make names in a directory survive the machine."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


disk = Disk()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it, however often the kernel takes only a part."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[disk.write(descriptor, [view[:_PIECE]]) :]


def write_all_at(descriptor: int, data: bytes, offset: int) -> None:
    """The same in the middle of a file."""
    written = 0
    while written < len(data):
        written += disk.write_at(descriptor, data[written:], offset + written)


@contextlib.contextmanager
def new_file(path: Path, *, is_synced: bool = True) -> Iterator[int]:
    """A file to write, which appears under its name when it is complete, or not at all.

    Args:
        path: Its name; an old file is replaced.
        is_synced: It is on disk then, too.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        descriptor = disk.create(temporary)
        try:
            yield descriptor
            if is_synced:
                disk.sync(descriptor)
        finally:
            os.close(descriptor)
        disk.rename(temporary, path)
        if is_synced:
            disk.sync_directory(path.parent)
    except BaseException:
        discard(temporary)
        raise


def replace(temporary: Path, path: Path) -> None:
    """Give a synced file its name, for good."""
    disk.rename(temporary, path)
    disk.sync_directory(path.parent)


def discard(path: Path) -> None:
    """Delete a file that nobody needs; if the disk refuses, it stays."""
    with contextlib.suppress(OSError):
        disk.unlink(path)


def make_directories(path: Path) -> None:
    """Make a directory and those above it, for good."""
    if path.exists():
        return
    make_directories(path.parent)
    disk.make_directory(path)
    disk.sync_directory(path.parent)
