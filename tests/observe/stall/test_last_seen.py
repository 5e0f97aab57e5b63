"""What is known of a process that is gone, or about to be, by its records."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.observe.records import Activity, Status
from paceline.observe.ring import EventWriter
from paceline.observe.ring_layout import MIN_BYTES
from paceline.observe.run_folder import RUN_DIR, RunFolder
from paceline.observe.stall.last_seen import ended_first, last_activity, last_seen
from paceline.processes import host_name
from tests.observe.sample_records import INFO

MS = 1_000_000  # stamps are kept to some microseconds


def write(folder: RunFolder, rank: int, status: Status, host: str = "") -> None:
    info = replace(INFO, rank=rank, pid=100 + rank, host=host or host_name())
    with closing(EventWriter(folder.events(rank), info, MIN_BYTES)) as writer:
        writer.set_status(status)


def test_who_ended_first_with_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that raised because of it come later; an end in order counts if nobody has raised."""
    folder = RunFolder(tmp_path)
    write(folder, 0, Status(Activity.ENDED, 50 * MS, 6, 50 * MS, detail="PeerLostError: rank 1"))
    write(
        folder, 1, Status(Activity.ENDED, 40 * MS, 6, 40 * MS, detail="ValueError: a\x1b bad batch")
    )
    write(folder, 2, Status(Activity.ENDED, 10 * MS, 6, 10 * MS))
    write(folder, 3, Status(Activity.FORWARD, 5 * MS, 6, 5 * MS, detail="ValueError: of before"))
    write(
        folder,
        4,
        Status(Activity.ENDED, 1 * MS, 6, 1 * MS, detail="KeyError: elsewhere"),
        "another host",
    )
    folder.events(5).write_bytes(b"damaged")
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    assert ended_first(range(100, 110)) == (101, "ValueError: a  bad batch")
    assert ended_first([100, 102]) == (100, "PeerLostError: rank 1")
    assert ended_first([102, 103, 104]) == (102, "")
    assert ended_first([103, 104]) == ended_first([]) == (0, "")
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "nowhere"))
    assert ended_first([101]) == (0, "")
    monkeypatch.delenv(RUN_DIR)
    assert ended_first([101]) == (0, "")


def test_what_a_process_did_before_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    info = replace(INFO, rank=0, pid=100, host=host_name())
    with closing(EventWriter(folder.events(0), info, MIN_BYTES)) as writer:
        writer.set_activity(Activity.FORWARD, 10 * MS, 6)
        assert last_seen(100) == " It was last seen in forward, in step 6."
        writer.end(20 * MS, 6)
        assert last_seen(100) == " It was last seen in forward, in step 6."
        writer.set_status(Status(Activity.ENDED, 30 * MS, 6, 30 * MS, detail="ValueError: bad"))
        assert last_seen(100) == " It was last seen in step 6."
        writer.set_status(Status(Activity.ENDED, 30 * MS, 6, 30 * MS))
        writer.words[2] = 0  # a file of before
        assert last_activity(folder, 0) == "at its end, in step 6"
        writer.words[2] = 15  # damaged
        assert last_activity(folder, 0)
    assert last_seen(101) == ""
