"""A file of records: what goes in comes out, whoever dies or reads meanwhile."""

from __future__ import annotations

import errno
import math
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import RecordsError
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
from paceline.observe.ring import EventWriter, read_history, read_info, read_status
from tests.children import begin_in_fork, wait_for
from tests.examples import examples
from tests.observe import sample_records as sample
from tests.observe.sample_records import INFO, make_step

FEW = settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SMALL = layout.MIN_BYTES


@contextmanager
def open_ring(path: Path, info: RankInfo = INFO, file_bytes: int = SMALL) -> Iterator[EventWriter]:
    with closing(EventWriter(path, info, file_bytes)) as writer:
        yield writer


@FEW
@given(
    info=sample.infos,
    status=sample.statuses,
    steps=st.lists(sample.steps, max_size=20),
    notes=st.lists(sample.notes, max_size=20),
    buckets=st.lists(sample.buckets, max_size=5),
)
def test_what_goes_in_comes_out(
    tmp_path: Path,
    info: RankInfo,
    status: Status,
    steps: list[StepRecord],
    notes: list[Note],
    buckets: list[BucketInfo],
) -> None:
    path = tmp_path / "rank0.events"
    with open_ring(path, info) as ring:
        for step in steps:
            ring.append_step(step)
        for note in notes:
            ring.append_note(note)
        ring.append_buckets(buckets)
        ring.set_status(status)
        alive = read_history(path)
    after = read_history(path)
    beat = max(status.since_ns, status.beat_ns)
    assert (
        alive
        == after
        == RankHistory(
            replace(info, buckets=tuple(buckets)),
            replace(status, beat_ns=beat),
            tuple(steps),
            tuple(notes),
        )
    )
    assert read_status(path) == after.status
    assert read_info(path) == info


def test_nan_stays_nan(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events"
    with open_ring(path) as ring:
        ring.append_step(replace(make_step(1), loss=math.nan))
        ring.set_status(Status(Activity.INPUT, 4096, 1, 1))
    assert math.isnan(read_history(path).steps[0].loss)
    assert math.isnan(read_status(path).loss)


@pytest.mark.parametrize("buckets", [0, 1, 6, 40, 900])
def test_the_newest_are_kept_when_it_wraps(tmp_path: Path, buckets: int) -> None:
    path = tmp_path / "rank0.events"
    total = 9000 if buckets < 10 else 400
    with open_ring(path) as ring:
        for number in range(1, total):
            ring.append_step(make_step(number, buckets))
    steps = read_history(path).steps
    assert list(steps) == [make_step(n, buckets) for n in range(total - len(steps), total)]
    body_bytes = 152 + 32 * buckets
    area = layout.steps_area(SMALL)
    assert len(steps) * body_bytes > (area.count - 1) * area.block_bytes / 2 or buckets > 100


def test_five_thousand_steps_fit_by_default(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events"
    with open_ring(path, file_bytes=layout.DEFAULT_BYTES) as ring:
        for number in range(1, 5001):
            ring.append_step(make_step(number, 40 if number % 2 else 6, number % 2))
    assert len(read_history(path).steps) == 5000


def test_more_than_fits_is_cut_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events"
    many = BucketInfo(0, 0, 5, tuple(f"layer.{i}.weight" for i in range(20_000)))
    numbers = tuple((f"n{i}" * 100, float(i)) for i in range(100))
    with open_ring(path) as ring:
        ring.append_buckets([many, replace(many, index=1, parameters=("ü" * 1000,))])
        ring.append_note(Note(1, "kind" * 1000, "ä\x1b\n" * 50_000))
        ring.append_step(replace(make_step(1, 2000), numbers=numbers))
        ring.set_info(replace(INFO, host="h" * 50_000))
        ring.set_status(Status(Activity.ENDED, 4096, 1, 1, detail="x" * 5000))
    history = read_history(path)
    first, second = history.info.buckets
    kept = len(first.parameters) - 1
    assert first.parameters[:kept] == many.parameters[:kept]
    assert first.parameters[-1] == f"... and {20_000 - kept} more"
    assert kept > 1000
    assert second.parameters[0].startswith("üü")
    assert history.notes[0].text.startswith("ä \nä \n")
    assert len(history.steps[0].buckets) == 900
    assert len(history.steps[0].numbers) == 32
    assert history.info.host.startswith("hhh")
    assert history.status.detail.startswith("xxx")


def test_the_step_in_the_status_fits_the_activity(tmp_path: Path) -> None:
    """Also if the writer died between the two stores: then the step is ahead of the word."""
    path = tmp_path / "rank0.events"
    with open_ring(path) as ring:
        for step in (0, 1, 5, 255, 256, 257, 100_000):
            ring.set_activity(Activity.FORWARD, 4096_000, step)
            assert read_status(path).step == step
            for moved in (-1, 1, 2, 100):
                ring.words[1] = max(0, step + moved)
                assert read_status(path).step == step
                assert read_status(path).since_ns == 4096_000


def test_an_earlier_file_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events"
    for pid in (1, 2, 3):
        with open_ring(path, replace(INFO, pid=pid)):
            assert read_info(path).pid == pid
    assert read_info(tmp_path / "rank0.events.old").pid == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.events", "rank0.events.old"]


def test_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open_ring(tmp_path / "rank0.events"):
            mode = stat.S_IMODE((tmp_path / "rank0.events").stat().st_mode)
    finally:
        os.umask(before)
    assert mode == 0o600


# --- beside others --------------------------------------------------------------------------------


def read_while(path: Path, rounds: int) -> int:
    """Read as often as that; everything must be as it was written. Return the newest step."""
    newest = 0
    for _ in range(rounds):
        history = read_history(path)
        for step in history.steps:
            assert step == make_step(step.step, step.step % 9)
        numbers = [step.step for step in history.steps]
        assert numbers == sorted(set(numbers))
        assert history.status.detail == str(history.status.rss_bytes)
        for note in history.notes:
            assert note.text == f"note {note.at_ns} " * (note.at_ns % 50)
        newest = max([newest, *numbers])
    return newest


def write_for_ever(path: Path) -> None:
    writer = EventWriter(path, INFO, SMALL)
    number = 0
    while True:
        number += 1
        writer.append_step(make_step(number, number % 9))
        writer.set_status(
            Status(
                Activity(number % 9), number << 12, number, 1, rss_bytes=number, detail=str(number)
            )
        )
        writer.append_note(Note(number, "test", f"note {number} " * (number % 50)))


def begin_writing(path: Path) -> int:
    pid = begin_in_fork(lambda: write_for_ever(path))
    until_s = time.monotonic() + 60
    while not path.exists() or read_status(path).rss_bytes == 0:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return pid


def test_a_reader_beside_a_writer_and_after_its_death(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events"
    pid = begin_writing(path)
    try:
        beside = read_while(path, rounds=10)
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_for(pid)
    assert read_while(path, rounds=1) >= beside > 0


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    for turn in range(60):
        path = tmp_path / f"rank{turn}.events"
        pid = begin_writing(path)
        time.sleep(0.0007 * turn)
        os.kill(pid, signal.SIGKILL)
        wait_for(pid)
        assert read_while(path, rounds=1) > 0


def test_cut_off_inside_of_a_write(tmp_path: Path) -> None:
    """As a kill leaves it: each store of a write may have come through or not."""
    path = tmp_path / "rank0.events"
    with open_ring(path) as ring:
        ring.append_step(make_step(1))
        ring.set_status(Status(Activity.INPUT, 4096, 1, 1, detail="first"))
        ring.set_info(replace(INFO, pid=5))
        before = path.read_bytes()
        ring.append_step(make_step(2))
        ring.set_status(Status(Activity.INPUT, 4096, 2, 1, detail="second"))
        ring.set_info(replace(INFO, pid=6))
    after = path.read_bytes()
    changed = [i for i in range(len(after)) if before[i] != after[i]]
    for cut in (changed[len(changed) * part // 16] for part in range(1, 16)):
        path.write_bytes(after[:cut] + before[cut:])
        history = read_history(path)
        assert history.steps in ((make_step(1),), (make_step(1), make_step(2)))
        assert history.status.detail in ("first", "second")
        assert history.info.pid in (5, 6)


# --- damage ---------------------------------------------------------------------------------------


def full_file(path: Path) -> bytes:
    with open_ring(path) as ring:
        for number in range(1, 4000):
            ring.append_step(make_step(number, number % 9))
            ring.append_note(Note(number, "k", f"note {number}"))
        ring.append_buckets([BucketInfo(0, 0, 4, ("a", "b"))])
        ring.set_status(Status(Activity.FORWARD, 4096, 4000, 1, detail="whole"))
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return full_file(tmp_path_factory.mktemp("ring") / "rank0.events")


def check_partial(path: Path) -> None:
    """Either a clear error or a history in which every step was written."""
    try:
        steps = read_history(path).steps
    except RecordsError:
        steps = ()
    for step in steps:
        assert step == make_step(step.step, step.step % 9)


@FEW
@given(size=st.integers(0, SMALL))
def test_truncated(tmp_path: Path, whole: bytes, size: int) -> None:
    path = tmp_path / "rank0.events"
    path.write_bytes(whole[:size])
    check_partial(path)


@FEW
@given(
    at=st.lists(st.integers(0, SMALL - 1) | st.integers(0, layout.FIRST_PAGES), max_size=30),
    garbage=st.binary(min_size=1, max_size=200),
)
def test_damaged(tmp_path: Path, whole: bytes, at: list[int], garbage: bytes) -> None:
    path = tmp_path / "rank0.events"
    data = bytearray(whole)
    for offset in at:
        data[offset : offset + len(garbage)] = garbage
    path.write_bytes(data)
    check_partial(path)


@FEW
@given(garbage=st.binary(max_size=5000), with_head=st.booleans())
def test_garbage(tmp_path: Path, garbage: bytes, with_head: bool) -> None:
    path = tmp_path / "rank0.events"
    path.write_bytes((layout.encode_head(SMALL) if with_head else b"") + garbage)
    with pytest.raises(RecordsError, match=r"rank0\.events"):
        read_history(path)


@FEW
@given(body=st.binary(max_size=600))
def test_a_body_with_a_right_checksum_is_not_trusted_either(
    tmp_path: Path, whole: bytes, body: bytes
) -> None:
    path = tmp_path / "rank0.events"
    data = bytearray(whole)
    record = layout.encode_record(1 << 40, body)
    for offset in (
        layout.NOTES.offset,
        layout.BUCKETS.offset,
        layout.STATUS.offset,
        layout.steps_area(SMALL).offset,
    ):
        data[offset : offset + len(record)] = record
    path.write_bytes(data)
    history = read_history(path)
    assert all(isinstance(note.text, str) for note in history.notes)


def test_another_version_says_so(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "rank0.events"
    path.write_bytes(whole[:8] + bytes([9]) + whole[9:])
    with pytest.raises(RecordsError, match="version 9, and this Paceline reads version 1"):
        read_info(path)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "rank0.events"
    os.mkfifo(path)
    with pytest.raises(RecordsError, match="not a regular file"):
        read_status(path)


def test_a_full_disk_is_found_at_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(OSError, match="No space left"):
        EventWriter(tmp_path / "rank0.events", INFO, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_allocate_gets_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    path = tmp_path / "rank0.events"
    with open_ring(path, file_bytes=SMALL + 4096) as ring:
        ring.append_step(make_step(1))
    found = path.stat()
    assert found.st_size == SMALL + 4096 <= found.st_blocks * 512
    assert read_history(path).steps == (make_step(1),)
