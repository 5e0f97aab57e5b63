"""The write-ahead log: each sequenced message, before it is applied and acknowledged.

Written by ``ps/storage/durable.py``, read by it at the next start. A file is a head and records:

======== ===========================================================================
bytes    content
======== ===========================================================================
4, 4, 8  the head: ``PLPJ``, version, the journal's number
4, 4, 4  a record: CRC-32 of its own head up to the frames, CRC-32 of the frames, how
         many frames
8 x n    the length of each frame
...      the frames: a message as it came; or one frame, a message's head, and one of
         JSON: this message was refused, and why
======== ===========================================================================

[Note: torn and damaged]
A record is one ``write``. A process that is killed in it, or a disk that is full, leaves a prefix
at the end of the file, and a machine that stops may leave zeros where a sector was not written:
such an end was never acknowledged (or not synced). It is cut off, with a line in the log, if no
record was written after it: neither in this journal nor in a later one. Everything else is
*damage*, and nothing is guessed then: a record that is wrong and has others behind it, or a last
one that is complete and has other bytes than were written. That its head has a checksum of its own
tells one from the other: a wrong length would make what is behind it look like the missing rest of
a torn record.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from paceline.errors import ServerStateError
from paceline.ps.protocol.wire import Frame
from paceline.ps.storage import files

log = logging.getLogger("paceline.ps")

VERSION = 1
_MAGIC = b"PLPJ"
_HEAD = struct.Struct("<4sIQ")
_RECORD = struct.Struct("<III")
_MOST_FRAMES = 8
_SECTOR = 512  # what disks write at once, or a multiple of it


class Journal:
    """A journal that is being written.

    Args:
        path: Its file; made if it is not there.
        number: Of the snapshot that it follows.
        fsync: Whether ``sync`` does anything.

    Attributes:
        is_broken: A record could not be written. Nothing may follow it.

    Raises:
        OSError: The disk does not want to; there is no half-made journal then.
    """

    def __init__(self, path: Path, number: int, fsync: bool) -> None:
        self.path = path
        self.records = 0
        self.is_broken = False
        self._fsync = fsync
        if not path.exists() or not path.stat().st_size:
            with files.new_file(path, is_synced=fsync) as descriptor:
                files.write_all(descriptor, _HEAD.pack(_MAGIC, VERSION, number))
        self._descriptor = files.disk.open_end(path)
        self._size = os.fstat(self._descriptor).st_size

    def append(self, frames: Sequence[Frame]) -> None:
        """Write one record.

        Raises:
            OSError: It could not be written. A part of it may stand at the end.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        pieces: list[bytes | memoryview] = [_head_of(views), *views]
        total = sum(map(len, pieces))
        try:
            written = files.disk.write(self._descriptor, pieces)
            if written != total:
                # The kernel takes at most 2 GiB at once, or was interrupted, or the disk is full.
                rest = memoryview(b"".join(pieces))[written:]
                files.write_all(self._descriptor, rest)
        except OSError:
            self.is_broken = True
            with contextlib.suppress(OSError):  # else the next start does it
                files.disk.truncate(self._descriptor, self._size)
            raise
        self._size += total
        self.records += 1

    def sync(self) -> None:
        """With ``fsync``: return when all records are on disk."""
        if self._fsync:
            files.disk.sync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _head_of(frames: Sequence[memoryview | bytearray]) -> bytes:
    rest = struct.pack(f"<II{len(frames)}Q", _crc(frames), len(frames), *map(len, frames))
    return zlib.crc32(rest).to_bytes(4, "little") + rest


def _crc(frames: Sequence[memoryview | bytearray]) -> int:
    crc = 0
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return crc


class _Fault(enum.Enum):
    """Why there is no further record."""

    TORN = "the file ends inside of it, or its last sectors were never written"
    DAMAGED = "it is not what was written"


def has_records(path: Path) -> bool:
    """Say whether anything was written to a journal completely."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(_HEAD.size)
        record = _read_record(file, size)
        file.seek(_HEAD.size)
        return record is not _Fault.TORN and not _is_zeros(file)


def read_journal(path: Path, number: int, may_be_torn: bool) -> Iterator[list[bytearray]]:
    """Each record's frames. A torn end is cut off the file, if there may be one.

    Raises:
        ServerStateError: It is damaged, or of another version; the text says where.
    """
    with path.open("rb+") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if may_be_torn and (len(head) < _HEAD.size or (not any(head) and _is_zeros(file))):
            _cut(file, path, 0, size)
            return
        _check_head(path, head, number)
        good = _HEAD.size
        while good < size:
            record = _read_record(file, size)
            if isinstance(record, _Fault):
                file.seek(good)
                if not may_be_torn or (record is _Fault.DAMAGED and not _is_zeros(file)):
                    raise _damaged(path, good, size)
                _cut(file, path, good, size)
                return
            good = file.tell()
            yield record


def _cut(file: BinaryIO, path: Path, good: int, size: int) -> None:
    """Remove an end that was not written completely."""
    if size > good:
        log.warning(
            "%s ended in a message that was not written completely (the process was killed, the "
            "disk was full, or the machine stopped): %d bytes from byte %d on are cut off",
            *(path, size - good, good),
        )
        files.disk.truncate(file.fileno(), good)


def _read_record(file: BinaryIO, size: int) -> list[bytearray] | _Fault:
    start = file.read(_RECORD.size)
    if len(start) < _RECORD.size:
        return _Fault.TORN
    head_crc, crc, count = _RECORD.unpack(start)
    if not 0 < count <= _MOST_FRAMES:
        return _Fault.DAMAGED
    lengths = file.read(8 * count)
    if len(lengths) < 8 * count:
        return _Fault.TORN
    if zlib.crc32(start[4:] + lengths) != head_crc:
        return _Fault.DAMAGED
    sizes: tuple[int, ...] = struct.unpack(f"<{count}Q", lengths)
    left = size - file.tell() - sum(sizes)
    if left < 0:
        return _Fault.TORN
    frames = [bytearray(file.read(length)) for length in sizes]
    if _crc(frames) == crc:
        return frames
    is_torn = not left and _lacks_a_sector(b"".join(frames), size)
    return _Fault.TORN if is_torn else _Fault.DAMAGED


def _lacks_a_sector(data: bytes, end: int) -> bool:
    """Say whether data that end at this byte of a file have a sector of zeros."""
    start = end - len(data)
    first = -start % _SECTOR
    return any(not any(data[at : at + _SECTOR]) for at in range(first, len(data), _SECTOR))


def _check_head(path: Path, head: bytes, number: int) -> None:
    magic, version, found = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise ServerStateError(f"{path} is no journal of a Paceline server; move it away")
    if version != VERSION:
        raise ServerStateError(
            f"{path} is of version {version}, and this Paceline reads {VERSION}: start it with the "
            "Paceline that wrote it, and end it with SIGTERM, which leaves a snapshot"
        )
    if found != number:
        raise ServerStateError(f"{path} says that it is number {found}: files were renamed")


def _damaged(path: Path, good: int, size: int) -> ServerStateError:
    return ServerStateError(
        f"{path} is damaged at byte {good} of {size}: what is there is not what was written. "
        "Acknowledged pushes are lost from there on; to go back to that moment, cut the file at "
        f"that byte (truncate -s {good}) and move later journals away"
    )


def _is_zeros(file: BinaryIO) -> bool:
    while piece := file.read(1 << 20):
        if any(piece):
            return False
    return True
