"""Who takes part in an elastic job, from its file: what it says, and what makes no sense in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.observe.membership import Standing, read_membership, standing_of
from tests.observe.sample_records import INFO

LINE = {"at_s": 1.5, "epoch": 1, "why": "rank 1 died", "world": 2, "step": 7, "rebuilt_s": 0.25}


def write(path: Path, *lines: object) -> Path:
    file = path / "membership.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_a_job_that_is_not_elastic(tmp_path: Path) -> None:
    assert read_membership(tmp_path / "membership.jsonl") == ()
    assert standing_of(INFO, (), is_gone=True) is Standing.MEMBER


def test_changes(tmp_path: Path) -> None:
    begin = {"at_s": 0, "epoch": 0, "why": "", "world": 3, "step": 0}
    first, second = read_membership(write(tmp_path, begin, LINE | {"pids": {"0": 5, "3": 8}}))
    assert (first.world, second.world, second.why) == (3, 2, "rank 1 died")
    assert second.took_s == 0.25
    assert second.pids == {0: 5, 3: 8}
    assert [second.place_of(rank) for rank in (0, 1, 2)] == [0, 3, 2]
    assert first.place_of(2) == 2


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        "7",
        json.dumps(LINE | {"world": "many"}),
        json.dumps(LINE | {"at_s": float("nan")}),
        json.dumps(LINE | {"step": 1e400}),
        json.dumps(LINE | {"pids": {"a": 1}}),
        json.dumps(LINE | {"pids": [1]}),
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_what_makes_no_sense_is_left_out(line: str, tmp_path: Path) -> None:
    file = tmp_path / "membership.jsonl"
    file.write_bytes(line.encode("latin-1") + b"\n" + json.dumps(LINE).encode() + b'\n{"at_s": 3')
    assert [change.step for change in read_membership(file)] == [7]


def test_standings(tmp_path: Path) -> None:
    pids = {"0": 5, "3": 8}
    changes = read_membership(write(tmp_path, LINE | {"host": "node7", "pids": pids}))

    def standing(place: int, pid: int, *, is_gone: bool = False, host: str = "node7") -> Standing:
        info = replace(INFO, rank=place, pid=pid, host=host)
        return standing_of(info, changes, is_gone=is_gone)

    assert standing(0, 5) is Standing.MEMBER
    assert standing(0, 5, is_gone=True) is Standing.MEMBER, "the others wait for it"
    assert standing(0, 6) is Standing.SPARE, "it takes the place of 5"
    assert standing(1, 6) is Standing.SPARE
    assert standing(1, 6, is_gone=True) is Standing.LEFT
    assert standing(1, 6, host="node8") is Standing.MEMBER, "not known here"


def test_ranks_of_several_hosts_keep_their_names(tmp_path: Path) -> None:
    """The launcher of one host knows the places of its own ranks only."""
    (change,) = read_membership(write(tmp_path, LINE | {"world": 4, "pids": {"0": 5, "3": 8}}))
    assert [change.place_of(rank) for rank in range(4)] == [0, 1, 2, 3]
