"""The write-ahead log: each sequenced message, before it is applied and acknowledged.

Written by ``ps/durable.py``, read by it at the next start. A file is a head and records:

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
A record is one ``write``. A process that is killed in it leaves a prefix at the end of the file,
and a machine that fails may leave zeros or an end that is not what was written: such an end was
never acknowledged (or not synced), and is cut off. A record that is wrong and has others behind it
is *damage*: nothing is guessed then. That its head has a checksum of its own tells one from the
other: a wrong length would make what is behind it look like the missing rest of a torn record.
"""

from __future__ import annotations

import enum
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from paceline.errors import ServerStateError
from paceline.ps.tensor_file import sync_directory
from paceline.ps.wire import Frame

VERSION = 1
_MAGIC = b"PLPJ"
_HEAD = struct.Struct("<4sIQ")
_RECORD = struct.Struct("<III")
_MOST_FRAMES = 8


class Journal:
    """A journal that is being written.

    Args:
        path: Its file; made if it is not there.
        number: Of the snapshot that it follows.
        fsync: Whether ``sync`` does anything.

    Raises:
        OSError: The disk does not want to.
    """

    def __init__(self, path: Path, number: int, fsync: bool) -> None:
        self._fsync = fsync
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        if not os.fstat(self._descriptor).st_size:
            os.write(self._descriptor, _HEAD.pack(_MAGIC, VERSION, number))
            if fsync:
                os.fsync(self._descriptor)
                sync_directory(path.parent)
        self.path = path
        self.records = 0

    def append(self, frames: Sequence[Frame]) -> None:
        """Write one record.

        Raises:
            OSError: It did not fit; a part of it may stand at the end.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        pieces: list[bytes | memoryview] = [_head_of(views), *views]
        total = sum(map(len, pieces))
        written = os.writev(self._descriptor, pieces)
        if written != total:
            _write_rest(self._descriptor, pieces, written)
        self.records += 1

    def sync(self) -> None:
        """With ``fsync``: return when all records are on disk."""
        if self._fsync:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _write_rest(descriptor: int, pieces: list[bytes | memoryview], written: int) -> None:
    """The kernel takes at most 2 GiB at once, or was interrupted."""
    rest = memoryview(b"".join(pieces))[written:]
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


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

    TORN = "the file ends inside of it"
    WRONG_END = "it is the last one, and not what was written"
    DAMAGED = "it is wrong, and there is more behind it"


def read_journal(path: Path, number: int, is_last: bool) -> Iterator[list[bytearray]]:
    """Each record's frames. The torn end of the last journal is cut off the file.

    Raises:
        ServerStateError: It is damaged, or of another version; the text says where.
    """
    with path.open("rb+") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size and is_last:
            file.truncate(0)
            return
        _check_head(path, head, number)
        good = _HEAD.size
        while good < size:
            record = _read_record(file, size)
            if isinstance(record, _Fault):
                file.seek(good)
                if not is_last or (record is _Fault.DAMAGED and not _is_zeros(file)):
                    raise _damaged(path, good, size)
                file.truncate(good)
                return
            good = file.tell()
            yield record


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
    return _Fault.DAMAGED if left else _Fault.WRONG_END


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
        f"{path} is damaged at byte {good} of {size}, and there is more behind it. Acknowledged "
        "pushes are lost from there on; to go back to that moment, cut the file at that byte "
        f"(truncate -s {good}) and move later journals away"
    )


def _is_zeros(file: BinaryIO) -> bool:
    while piece := file.read(1 << 20):
        if any(piece):
            return False
    return True
