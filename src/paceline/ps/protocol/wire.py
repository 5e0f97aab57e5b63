"""The bytes between a trainer and a server. Pure: no socket, no table, no torch.

Both sides build messages with ``pack_*`` and take them apart with ``unpack``, which trusts nothing:
every size is checked against the bytes that are there before an array is made, and what does not
fit raises ``WireError``. Nothing here is pickle.

A message is a ZeroMQ multipart message:

====== =============================================================================
frame  content
====== =============================================================================
0      a head of 48 bytes; after it, for *control* kinds, JSON; for *data* kinds one
       record of 32 bytes for each section. A section is one table's share.
1      data kinds only: the integers (int64) of all sections, one after the other
2      data kinds only: the values of all sections, one after the other, raw; each
       array starts at a multiple of 8 bytes
====== =============================================================================

What a section holds follows from its ``form`` and from the kind of its message:

=========== ============================ ==================================================
form        integers                     values
=========== ============================ ==================================================
``ROWS``    ``ids`` different ids        LOOKUP: none. PUSH, WRITE, FOUND: ``ids x dim``
``BAGS``    ``ids`` ids, then ``bags``   LOOKUP: the weights. PUSH: the weights, then
            offsets as in EmbeddingBag   ``bags x dim``. FOUND: ``bags x dim``.
=========== ============================ ==================================================

The weights are ``ids`` values with the flag ``WEIGHTED``, and nothing without it. A FOUND message
repeats the counts of its LOOKUP, and has no integers. All numbers are little endian.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"PLPS"
VERSION = 1
ALIGNMENT = 8
CONTROL_BYTES = 1 << 16
"""JSON may not be longer than this."""
SECTIONS = 4096
"""A message may not have more sections than this."""

HEAD = struct.Struct("<4sHBBQ16sQII")
"""Magic, version, kind, flags (0), request, client, sequence, sections, reserved (0); ``pl_head``
in ``native/ps/rows.h``."""
_KIND_AT = 6
_CLIENT = slice(16, 32)
SECTION = struct.Struct("<IBBBBQQd")
"""Table, form, mode, flags, dtype, ids, bags, lr; ``pl_record`` in ``native/ps/rows.h``."""

RECORD = np.dtype(
    [
        *(("table", "<u4"), ("form", "u1"), ("mode", "u1"), ("flags", "u1"), ("dtype", "u1")),
        *(("ids", "<u8"), ("bags", "<u8"), ("lr", "<f8")),
    ]
)
"""The record of a section as numpy has it: whoever sends many sections keeps them as an array."""

Frame = bytes | bytearray | memoryview


class WireError(ValueError):
    """These bytes are no message of this version. The text says why. Nothing has changed."""


class Kind(enum.IntEnum):
    """What a message is. Requests are below 64; each is answered by one reply, in order."""

    HELLO = 1
    """Control. Who are you, and what was my last sequence number? Answered by WELCOME."""
    ATTACH = 2
    """Control, sequenced. Create a table, or use the one that is there. Answered by DONE."""
    LOOKUP = 3
    """Data. Answered by FOUND."""
    PUSH = 4
    """Data, sequenced. Gradients. Answered by DONE once they are applied and in the journal."""
    WRITE = 5
    """Data (ROWS), sequenced. Overwrite rows. Answered by DONE."""
    STATS = 6
    """Control. Answered by DONE."""
    SAVE = 7
    """Control. Write all tables to a directory. Answered by DONE when they are on disk."""
    LOAD = 8
    """Control, sequenced. Replace the rows of all tables by saved ones. Answered by DONE."""
    STAGE = 9
    """Control. Get everything ready for a LOAD, and change nothing. Answered by DONE."""

    WELCOME = 64
    DONE = 65
    FOUND = 66
    ERROR = 67


DATA = frozenset({Kind.LOOKUP, Kind.PUSH, Kind.WRITE, Kind.FOUND})
SEQUENCED = frozenset({Kind.ATTACH, Kind.PUSH, Kind.WRITE, Kind.LOAD})
DEFERRED = frozenset({Kind.SAVE, Kind.STAGE})
"""Answered when they are done, which may be after what was asked later."""


class Form(enum.IntEnum):
    """What stands behind the ids of a section."""

    ROWS = 0
    BAGS = 1


class Mode(enum.IntEnum):
    """How a server pools bags. ``max`` is always pooled by the trainer."""

    NONE = 0
    SUM = 1
    MEAN = 2


WEIGHTED = 1
"""The only flag of a section: there is a weight for each id."""


class Dtype(enum.IntEnum):
    """What rows are made of."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return (4, 8, 2, 2)[self]


class Head(NamedTuple):
    """The fixed part of a message.

    Args:
        kind: What it is.
        request: Chosen by whoever asks; the reply repeats it.
        client: Whoever asks, for as long as it lives; 16 random bytes.
        sequence: Sequenced kinds: 1 for the first of this client to this server, then one more for
            each. Others: 0. A server applies each number once.
    """

    kind: Kind
    request: int
    client: bytes
    sequence: int = 0


MAX_LEARNING_RATE = 1e4
"""No row survives a larger one; torch refuses those that a row's dtype does not have, but only in
the middle of an update. ``PL_MAX_LEARNING_RATE`` in ``native/ps/rows.h``."""


class Section(NamedTuple):
    """One table's share of a data message; ``dim`` is the table's, and not on the wire."""

    table: int
    form: Form
    dtype: Dtype
    ids: int
    bags: int = 0
    mode: Mode = Mode.NONE
    weighted: bool = False
    lr: float = 0.0

    @property
    def integers(self) -> int:
        """How many integers the section has."""
        return self.ids + self.bags  # no bags with ROWS

    def rows_bytes(self, dim: int) -> int:
        """How many bytes its rows or pooled bags take, with padding."""
        count = self.bags if self.form is Form.BAGS else self.ids
        return aligned(count * dim * self.dtype.itemsize)


class Message(NamedTuple):
    """A message, taken apart. Arrays are views of the frames."""

    head: Head
    control: Mapping[str, Any]
    sections: tuple[Section, ...]
    integers: NDArray[np.int64]
    values: memoryview
    records: memoryview
    """The records of the sections as they came; FOUND repeats those of its LOOKUP."""


def aligned(count_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-count_bytes // ALIGNMENT) * ALIGNMENT


def pack_control(head: Head, control: Mapping[str, Any]) -> list[Frame]:
    """A message with JSON in it."""
    if not control:
        return [pack_head(head, 0) + b"{}"]
    text = json.dumps(control, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > CONTROL_BYTES:
        raise WireError(f"{len(text)} bytes of JSON, of {CONTROL_BYTES} allowed")
    return [pack_head(head, 0) + text]


def pack_section(s: Section) -> bytes:
    """The record of one section."""
    return SECTION.pack(s.table, s.form, s.mode, s.weighted, s.dtype, s.ids, s.bags, s.lr)


def pack_head(head: Head, sections: int = 0) -> bytes:
    """The first 48 bytes of a message; records (as of ``RECORD``) or JSON follow."""
    return HEAD.pack(
        MAGIC, VERSION, head.kind, 0, head.request, head.client, head.sequence, sections, 0
    )


def unpack(frames: Sequence[Frame]) -> Message:
    """Take a message apart.

    Raises:
        WireError: It is none.
    """
    if not frames:
        raise WireError("no frame at all")
    first = memoryview(frames[0])
    head, sections = _unpack_head(first)
    rest = first[HEAD.size :]
    if head.kind not in DATA:
        control = _unpack_control(rest, frames, sections)
        return Message(head, control, (), _NO_INTEGERS, _NOTHING, _NOTHING)
    if len(frames) != 3:
        raise WireError(f"{head.kind.name} has {len(frames)} frames instead of 3")
    found = tuple(_unpack_sections(rest, sections))
    integers = _unpack_integers(head.kind, frames[1], found)
    return Message(head, {}, found, integers, memoryview(frames[2]).cast("B"), rest)


def client_of(frame: Frame) -> bytes:
    """Who says that it sent a message; its first frame has at least a head."""
    return bytes(frame[_CLIENT])


def is_error(frame: Frame) -> bool:
    """Say whether a reply whose head has been read is an ERROR."""
    return frame[_KIND_AT] == Kind.ERROR.value


def read_head(frame: Frame) -> tuple[Head, memoryview]:
    """The head of a message, and what follows it in the first frame, unread.

    Raises:
        WireError: It is none.
    """
    first = memoryview(frame)
    return _unpack_head(first)[0], first[HEAD.size :]


def control_of(frame: Frame) -> dict[str, Any]:
    """The JSON in the first frame of a control message whose head has been read."""
    found: dict[str, Any] = json.loads(bytes(memoryview(frame)[HEAD.size :]))
    return found


def is_repeated(frame: Frame, kind: Kind, records: bytes) -> bool:
    """Say whether the first frame of a message, whose head was read, is of this kind and has
    these records."""
    first = memoryview(frame)
    return first[_KIND_AT] == kind and first[HEAD.size :] == records


# By number: to call an enum takes ten times as long.
_KINDS = {kind.value: kind for kind in Kind}
_FORMS = {form.value: form for form in Form}
_MODES = {mode.value: mode for mode in Mode}
_DTYPES = {dtype.value: dtype for dtype in Dtype}
_BAGS, _NO_MODE, _SUM = Form.BAGS, Mode.NONE, Mode.SUM
_NO_INTEGERS: NDArray[np.int64] = np.empty(0, np.int64)
_NOTHING = memoryview(b"")


def _unpack_head(frame: memoryview) -> tuple[Head, int]:
    if len(frame) < HEAD.size:
        raise WireError(f"{len(frame)} bytes are too few for a head of {HEAD.size}")
    magic, version, kind, flags, request, client, sequence, sections, reserved = HEAD.unpack_from(
        frame
    )
    if magic != MAGIC:
        raise WireError(f"it begins with {magic!r} instead of {MAGIC!r}: not a Paceline message")
    if version != VERSION:
        raise WireError(f"version {version} of the protocol; this side speaks {VERSION}")
    if flags or reserved:
        raise WireError("a reserved field of the head is not zero")
    found = _KINDS.get(kind)
    if found is None:
        raise WireError(f"unknown kind {kind}")
    if (found in SEQUENCED) != (sequence > 0):
        raise WireError(f"{found.name} with sequence number {sequence}")
    return Head(found, request, client, sequence), sections


def _unpack_control(text: memoryview, frames: Sequence[Frame], sections: int) -> Mapping[str, Any]:
    if len(frames) != 1 or sections:
        raise WireError(f"a control message with {len(frames)} frames and {sections} sections")
    if len(text) > CONTROL_BYTES:
        raise WireError(f"{len(text)} bytes of JSON, of {CONTROL_BYTES} allowed")
    try:
        control = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise WireError(f"its JSON cannot be read: {type(error).__name__}") from None
    if not isinstance(control, dict):
        raise WireError("its JSON is no object")
    return control


def _unpack_sections(records: memoryview, count: int) -> Iterable[Section]:
    if count > SECTIONS:
        raise WireError(f"{count} sections, of {SECTIONS} allowed")
    if len(records) != count * SECTION.size:
        raise WireError(f"{len(records)} bytes are not {count} sections of {SECTION.size} bytes")
    for table, form, mode, flags, dtype, ids, bags, lr in SECTION.iter_unpack(records):
        if flags & ~WEIGHTED:
            raise WireError(f"unknown flags {flags:#x} of a section")
        if form not in _FORMS or dtype not in _DTYPES or mode not in _MODES:
            raise WireError(f"unknown form {form}, dtype {dtype} or mode {mode} of a section")
        section = Section(
            table, _FORMS[form], _DTYPES[dtype], ids, bags, _MODES[mode], flags == WEIGHTED, lr
        )
        _check_form(section)
        yield section


def _check_form(section: Section) -> None:
    is_bags = section.form is _BAGS
    if is_bags != (section.mode is not _NO_MODE) or (not is_bags and section.bags):
        raise WireError(f"form {section.form.name} with mode {section.mode.name}")
    if section.weighted and section.mode is not _SUM:
        raise WireError(f"weights with mode {section.mode.name}")


def _unpack_integers(kind: Kind, frame: Frame, sections: Sequence[Section]) -> NDArray[np.int64]:
    count = 0 if kind is Kind.FOUND else sum(section.integers for section in sections)
    view = memoryview(frame).cast("B")
    if len(view) != count * 8:
        raise WireError(f"{len(view)} bytes are not the {count} integers that were announced")
    return np.frombuffer(view, "<i8")
