"""A rank's file of records: one bounded, mapped file that anybody can read while it is written.

The recorder writes with :class:`EventWriter`; live table, report and doctor read with
:func:`read_history`, :func:`read_status` and :func:`read_info`. ring_layout.py says where things
lie and why a reader never sees half of something; ring_codec.py what their bytes mean. Must not
know who calls, nor anything of torch.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from paceline.errors import RecordsError
from paceline.observe import ring_codec as codec
from paceline.observe import ring_layout as layout
from paceline.observe.records import (
    Activity,
    BucketInfo,
    Note,
    RankHistory,
    RankInfo,
    Status,
    StepRecord,
)
from paceline.observe.ring_blocks import BlockWriter, read_blocks

_T = TypeVar("_T")
_WORDS = struct.Struct("<QQQ")


class EventWriter:
    """Writes one rank's file. Methods may be called from any thread.

    Args:
        path: Where it shall be. A file that is there already, of an earlier process of this rank,
            is kept under ``<name>.old``.
        info: Who writes.
        file_bytes: How large it is, from the begin to the end.

    Raises:
        OSError: The file cannot be made: the disk is full, the folder is not there or not ours.
    """

    def __init__(
        self, path: str | os.PathLike[str], info: RankInfo, file_bytes: int = layout.DEFAULT_BYTES
    ) -> None:
        if not layout.MIN_BYTES <= file_bytes <= layout.MAX_BYTES:
            raise ValueError(
                f"a file of records has {layout.MIN_BYTES} to {layout.MAX_BYTES} bytes, "
                f"not {file_bytes}"
            )
        self._map = _create(Path(path), info, file_bytes)
        self._memory = memoryview(self._map)
        begin = layout.ACTIVITY_OFFSET
        self.words = self._memory[begin : begin + _WORDS.size].cast("Q")
        self._steps = BlockWriter(self._memory, layout.steps_area(file_bytes))
        self._notes = BlockWriter(self._memory, layout.NOTES)
        self._buckets = BlockWriter(self._memory, layout.BUCKETS)
        self._status_number, self._info_number = 0, 1
        # Reentrant: a signal handler may write in the middle of a write.
        self._lock = threading.RLock()

    def set_activity(self, activity: Activity, since_ns: int, step: int) -> None:
        """Say what the rank does now. Two stores; no lock, no system call."""
        self.words[1] = step
        self.words[0] = encode_activity(activity, since_ns, step)

    def end(self, since_ns: int, step: int) -> None:
        """The process ends: keep what it was doing."""
        self.words[2] = self.words[0]
        self.set_activity(Activity.ENDED, since_ns, step)

    def set_status(self, status: Status) -> None:
        """Say how the rank is doing; its activity too."""
        self.write_status(codec.encode_status(status, layout.STATUS.body_bytes))
        self.set_activity(status.activity, status.since_ns, status.step)

    def write_status(self, body: bytes) -> None:
        """Write a status that is encoded already, and leave the activity."""
        with self._lock:
            self._status_number += 1
            self._write_pair(layout.STATUS, self._status_number, body)

    def set_info(self, info: RankInfo) -> None:
        """Write who this is anew, when more of it is known; buckets are appended."""
        body = codec.encode_info(info, layout.INFO.body_bytes)
        with self._lock:
            self._info_number += 1
            self._write_pair(layout.INFO, self._info_number, body)
        self.append_buckets(info.buckets)

    def append_step(self, record: StepRecord) -> None:
        """Keep a step."""
        self.append_step_body(codec.encode_step(record))

    def append_step_body(self, body: bytes) -> None:
        """Keep a step that is encoded already."""
        with self._lock:
            self._steps.append(body)

    def append_note(self, note: Note) -> None:
        """Keep a note."""
        with self._lock:
            self._notes.append(codec.encode_note(note, layout.NOTES.body_bytes))

    def append_buckets(self, buckets: Iterable[BucketInfo]) -> None:
        """Keep what buckets hold from now on."""
        with self._lock:
            for info in buckets:
                self._buckets.append(codec.encode_bucket(info, layout.BUCKETS.body_bytes))

    def _write_pair(self, pair: layout.Pair, number: int, body: bytes) -> None:
        begin = pair.offset + (number & 1) * pair.record_bytes
        record = layout.encode_record(number, body)
        self._memory[begin : begin + len(record)] = record

    def close(self) -> None:
        """Give the mapping back. The file stays; nothing may be written any more."""
        with self._lock:
            self.words.release()
            self._memory.release()
            self._map.close()


def encode_activity(activity: int, since_ns: int, step: int) -> int:
    """Return the activity word: see ring_layout.py."""
    low = (step & layout.STEP_MASK) << layout.ACTIVITY_BITS | activity
    return since_ns & layout.STAMP_MASK | low


# --- making a file -------------------------------------------------------------------------------


def _create(path: Path, info: RankInfo, file_bytes: int) -> mmap.mmap:
    """Make the file under another name, private, with all its blocks; then give it its name."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        _allocate(descriptor, file_bytes)
        mapped = mmap.mmap(descriptor, file_bytes)
        first = layout.encode_record(1, codec.encode_info(info, layout.INFO.body_bytes))
        begin = layout.INFO.offset + layout.INFO.record_bytes
        mapped[begin : begin + len(first)] = first
        head = layout.encode_head(file_bytes)
        mapped[: len(head)] = head
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, path.with_name(f"{path.name}.old"))
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(descriptor)
    return mapped


def _allocate(descriptor: int, file_bytes: int) -> None:
    """Have the blocks of the file now: a full disk is an error here, and SIGBUS later."""
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        zeros = bytes(1 << 20)
        for offset in range(0, file_bytes, len(zeros)):
            _write_all(descriptor, zeros[: file_bytes - offset], offset)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# --- reading -------------------------------------------------------------------------------------


def read_history(path: str | os.PathLike[str]) -> RankHistory:
    """Return all that a rank's file holds. What is damaged or cut off is left out.

    Raises:
        RecordsError: It is no such file, or so damaged that nobody can say whose it is.
        OSError: It cannot be read.
    """
    data = _read(path, layout.MAX_BYTES)
    file_bytes = _check_head(path, data)
    buckets = _decode_all(data, layout.BUCKETS, codec.decode_bucket)
    return RankHistory(
        info=replace(_info(path, data), buckets=buckets),
        status=_status(data),
        steps=_decode_all(data, layout.steps_area(file_bytes), codec.decode_step),
        notes=_decode_all(data, layout.NOTES, codec.decode_note),
    )


def read_status(path: str | os.PathLike[str]) -> Status:
    """Return what a rank does at this moment; cheap.

    Raises:
        RecordsError: It is no file of records.
        OSError: It cannot be read.
    """
    data = _read(path, layout.FIRST_PAGES)
    _check_head(path, data)
    return _status(data)


def read_info(path: str | os.PathLike[str]) -> RankInfo:
    """Return who wrote a file, without its buckets; cheap.

    Raises:
        RecordsError: It is no file of records, or so damaged that nobody can say whose it is.
        OSError: It cannot be read.
    """
    data = _read(path, layout.FIRST_PAGES)
    _check_head(path, data)
    return _info(path, data)


def _read(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read the begin of a file; a pipe or a device is refused, not waited for."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise RecordsError(f"{path} is no file of records: it is not a regular file")
        return file.read(limit)


def _check_head(path: str | os.PathLike[str], data: bytes) -> int:
    """Return how large the file was made."""
    head_bytes = layout.HEAD.size + layout.HEAD_CRC.size
    if len(data) < head_bytes or not data.startswith(layout.MAGIC):
        raise RecordsError(f"{path} is no file of records, or cut off: it has no right begin")
    _, version, file_bytes = layout.HEAD.unpack_from(data)
    if version != layout.VERSION:
        raise RecordsError(
            f"{path} is a file of records of version {version}, and this Paceline reads version "
            f"{layout.VERSION}: use the Paceline that wrote it"
        )
    (crc,) = layout.HEAD_CRC.unpack_from(data, layout.HEAD.size)
    is_whole = crc == zlib.crc32(data[: layout.HEAD.size])
    if not is_whole or not layout.MIN_BYTES <= file_bytes <= layout.MAX_BYTES:
        raise RecordsError(f"{path} is damaged: its first bytes have a wrong checksum")
    return int(file_bytes)


def _info(path: str | os.PathLike[str], data: bytes) -> RankInfo:
    body = _newest(data, layout.INFO)
    info = codec.decode_info(body) if body is not None else None
    if info is None:
        raise RecordsError(f"{path} is damaged: nobody can say which rank wrote it")
    return info


def _status(data: bytes) -> Status:
    body = _newest(data, layout.STATUS)
    status = codec.decode_status(body) if body is not None else None
    if status is None:
        status = Status(Activity.STARTING, 0, 0, 0)
    if len(data) < layout.ACTIVITY_OFFSET + _WORDS.size:
        return status
    word, step, last_word = _WORDS.unpack_from(data, layout.ACTIVITY_OFFSET)
    try:
        activity = _activity(word)
        has_ended = activity is Activity.ENDED and last_word
        before_end = _activity(last_word) if has_ended else None
    except ValueError:
        return status  # damaged
    since_ns = word & layout.STAMP_MASK
    half = 1 << (layout.STEP_BITS - 1)
    ahead = ((word >> layout.ACTIVITY_BITS) - step + half & layout.STEP_MASK) - half
    step = max(0, step + ahead)
    beat_ns = max(since_ns, status.beat_ns)
    return replace(
        status,
        activity=activity,
        since_ns=since_ns,
        step=step,
        beat_ns=beat_ns,
        before_end=before_end,
    )


def _activity(word: int) -> Activity:
    return Activity(word & (1 << layout.ACTIVITY_BITS) - 1)


def _newest(data: bytes, pair: layout.Pair) -> bytes | None:
    begins = (pair.offset, pair.offset + pair.record_bytes)
    found = [layout.decode_record(data, begin, begin + pair.record_bytes) for begin in begins]
    number, body = max(found)
    return body if number else None


def _decode_all(
    data: bytes, area: layout.Blocks, decode: Callable[[bytes], _T | None]
) -> tuple[_T, ...]:
    found = (decode(body) for body in read_blocks(data, area))
    return tuple(each for each in found if each is not None)
