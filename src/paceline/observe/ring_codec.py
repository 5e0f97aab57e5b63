"""Turns records into bytes and back: the bodies of what lies in a file of records.

Used by ring.py, and by the recorder for what is written in every step. What is read is not trusted:
sizes and types are checked, texts are bounded and fit for a terminal. A body that makes no sense is
None. Must not know files.

    step      STEP_HEAD, then for each bucket its bytes, then all ready, all began, all ended
              stamps (8 bytes each), then for each number: value (8), length of its name (1), name
    status    STATUS_HEAD, then the detail in UTF-8
    others    JSON
"""

from __future__ import annotations

import functools
import json
import operator
import struct
from collections.abc import Sequence
from typing import Any

from paceline.observe.records import (
    Activity,
    BucketInfo,
    BucketTimes,
    Note,
    RankInfo,
    Status,
    StepRecord,
)
from paceline.printable import printable

STEP_HEAD = struct.Struct("<qIHBB8qd5q")
"""step, wrapper, number of buckets, number of numbers, flags, _STEP_FIELDS."""

_STEP_FIELDS = (
    "began_ns",
    "forward_began_ns",
    "forward_ended_ns",
    "backward_began_ns",
    "backward_ended_ns",
    "reduced_ns",
    "optimizer_began_ns",
    "optimizer_ended_ns",
    "loss",
    "samples",
    "cpu_ns",
    "run_delay_ns",
    "major_faults",
    "stolen_ns",
)

_step_values = operator.attrgetter(*_STEP_FIELDS)

SKIPPED, JOINED = 1, 2
"""Flags of a step."""

STATUS_HEAD = struct.Struct("<qqdddiq")
"""step, beat_ns, loss, samples_per_s, waiting_share, last_rank, rss_bytes."""

MAX_BUCKETS = 900
"""Of one step; of more, the first are kept."""

MAX_NUMBERS = 32
MAX_NAME_BYTES = 64
_NUMBER = struct.Struct("<dB")
_MAX_TEXT = 1500
_MAX_WORDS = 300


# --- steps ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def step_struct(buckets: int) -> struct.Struct:
    """How a step with so many buckets is packed: the fields of STEP_HEAD, then four columns."""
    return struct.Struct(f"{STEP_HEAD.format}{4 * buckets}q")


def encode_step(record: StepRecord) -> bytes:
    """Return a record's body. The recorder does the same without making a StepRecord."""
    buckets = record.buckets[:MAX_BUCKETS]
    numbers = encode_numbers(record.numbers)
    flags = record.is_skipped * SKIPPED | record.is_joined * JOINED
    body = step_struct(len(buckets)).pack(
        record.step,
        record.wrapper,
        len(buckets),
        min(len(record.numbers), MAX_NUMBERS),
        flags,
        *_step_values(record),
        *(each.bytes for each in buckets),
        *(each.ready_ns for each in buckets),
        *(each.began_ns for each in buckets),
        *(each.ended_ns for each in buckets),
    )
    return body + numbers


def encode_numbers(numbers: Sequence[tuple[str, float]]) -> bytes:
    """Return what stands behind a step's buckets."""
    return b"".join(
        _NUMBER.pack(value, len(name)) + name
        for name, value in ((encode_name(name), value) for name, value in numbers[:MAX_NUMBERS])
    )


@functools.lru_cache(maxsize=256)
def encode_name(name: str) -> bytes:
    """Return a number's name as it is stored: bounded, and never cut inside of a character."""
    return _cut(name, MAX_NAME_BYTES).encode()


def decode_step(body: bytes) -> StepRecord | None:
    """Return the step; None if it is none."""
    if len(body) < STEP_HEAD.size:
        return None
    step, wrapper, count, named, flags, *values = STEP_HEAD.unpack_from(body)
    end = STEP_HEAD.size + 32 * count
    if end > len(body):
        return None
    columns = struct.unpack_from(f"<{4 * count}q", body, STEP_HEAD.size)
    fields: dict[str, Any] = dict(zip(_STEP_FIELDS, values, strict=True))
    return StepRecord(
        step=step,
        wrapper=wrapper,
        buckets=tuple(BucketTimes(index, *columns[index::count]) for index in range(count)),
        is_skipped=bool(flags & SKIPPED),
        is_joined=bool(flags & JOINED),
        numbers=_decode_numbers(body, end, named),
        **fields,
    )


def _decode_numbers(body: bytes, offset: int, count: int) -> tuple[tuple[str, float], ...]:
    found = []
    for _ in range(min(count, MAX_NUMBERS)):
        begin = offset + _NUMBER.size
        if begin > len(body):
            break
        value, size = _NUMBER.unpack_from(body, offset)
        offset = begin + size
        found.append((printable(body[begin:offset].decode("utf-8", "replace")), value))
    return tuple(found)


# --- status --------------------------------------------------------------------------------------


def encode_status(status: Status, limit: int) -> bytes:
    """Return the body of a status record; activity and ``since_ns`` are in a word of their own."""
    head = STATUS_HEAD.pack(
        status.step,
        status.beat_ns,
        status.loss,
        status.samples_per_s,
        status.waiting_share,
        status.last_rank,
        status.rss_bytes,
    )
    return head + _cut(status.detail, limit - STATUS_HEAD.size).encode()


def decode_status(body: bytes) -> Status | None:
    """Return the status, with an activity that is still to be filled in."""
    if len(body) < STATUS_HEAD.size:
        return None
    step, beat_ns, loss, samples_per_s, share, last_rank, rss_bytes = STATUS_HEAD.unpack_from(body)
    detail = printable(body[STATUS_HEAD.size :].decode("utf-8", "replace"))
    return Status(
        Activity.STARTING,
        0,
        step,
        beat_ns,
        loss,
        samples_per_s,
        share,
        last_rank,
        rss_bytes,
        detail,
    )


# --- what is written rarely ----------------------------------------------------------------------


def encode_info(info: RankInfo, limit: int) -> bytes:
    """Return the body of a rank's description, without its buckets."""
    fields = {
        name: _cut(value, _MAX_TEXT) if isinstance(value, str) else value
        for name, value in vars(info).items()
        if name != "buckets"
    }
    body = _to_json(fields)
    if len(body) > limit:
        raise ValueError(f"a description of {len(body)} bytes; {limit} is the most")
    return body


def decode_info(body: bytes) -> RankInfo | None:
    """Return the description; None if it is none."""
    found = _from_json(body)
    numbers = ("rank", "local_rank", "world", "pid", "threads", "cores", "wall_minus_monotonic_ns")
    texts = ("host", "transport", "transport_reason")
    if not _has(found, int, numbers) or not _has(found, str, texts):
        return None
    fields: dict[str, Any] = {name: found[name] for name in numbers}
    fields |= {name: printable(found[name]) for name in texts}
    if _has(found, str, ("core_list",)):
        fields["core_list"] = printable(found["core_list"])
    return RankInfo(**fields)


def encode_bucket(info: BucketInfo, limit: int) -> bytes:
    """Return the body of a bucket's description; names that do not fit are counted."""
    names = [_cut(name, _MAX_WORDS) for name in info.parameters]
    fields = {
        "wrapper": info.wrapper,
        "index": info.index,
        "bytes": info.bytes,
        "first_step": info.first_step,
    }
    kept = len(names)
    while len(body := _to_json(fields | {"parameters": _shortened(names, kept)})) > limit:
        kept = min(kept - 1, kept * limit // len(body))
    return body


def _shortened(names: list[str], kept: int) -> list[str]:
    left = len(names) - kept
    return names if not left else [*names[:kept], f"... and {left} more"]


def decode_bucket(body: bytes) -> BucketInfo | None:
    """Return the description; None if it is none."""
    found = _from_json(body)
    names = found.get("parameters")
    if not _has(found, int, ("wrapper", "index", "bytes", "first_step")):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return BucketInfo(
        found["wrapper"],
        found["index"],
        found["bytes"],
        tuple(printable(name) for name in names),
        found["first_step"],
    )


def encode_note(note: Note, limit: int) -> bytes:
    """Return a note's body; the text is cut if there is no room for it."""
    text = _cut(note.text, limit // 6 - 200)  # 6 bytes are the most that JSON makes of one
    return _to_json({"at_ns": note.at_ns, "kind": _cut(note.kind, _MAX_WORDS // 6), "text": text})


def decode_note(body: bytes) -> Note | None:
    """Return the note; None if it is none."""
    found = _from_json(body)
    if not _has(found, int, ("at_ns",)) or not _has(found, str, ("kind", "text")):
        return None
    return Note(found["at_ns"], printable(found["kind"]), printable(found["text"]))


# --- texts and JSON ------------------------------------------------------------------------------


def _cut(text: str, limit: int) -> str:
    """Bound a text to so many bytes; what UTF-8 cannot say is replaced."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _from_json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _has(found: dict[str, Any], kind: type, names: Sequence[str]) -> bool:
    """Say whether all these are there, of this type; numbers of a size that can be a stamp."""
    values = [found.get(name) for name in names]
    if not all(type(value) is kind for value in values):
        return False
    return kind is not int or all(abs(value) <= 1 << 63 for value in values if value is not None)
