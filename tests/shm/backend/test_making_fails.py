"""Groups whose making fails half way: nothing of them stays open, however often that happens."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from paceline.liveness import Watch, lost_peers
from paceline.shm.attach import connect as connecting
from paceline.shm.attach.connect import SharingRefusal
from paceline.shm.attach.handshake import Handshake
from paceline.shm.backend import process_group
from paceline.testing import run_ranks

ATTEMPTS = 8


class _PlannedError(RuntimeError):
    pass


def _fail(*_: Any, **__: Any) -> None:
    raise _PlannedError


def _lose_a_rank(gather: Any, step: Callable[[], None]) -> SharingRefusal | None:
    """The memory is mapped here, and a rank dies before it says that it has done so, too."""
    step()
    if getattr(step, "__func__", None) is Handshake.map_all:
        raise _PlannedError
    gather(["", False])
    return None


POINTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "before ranks know each other": (Watch, "meet", _fail),
    "in gloo": (process_group, "CpuBackend", _fail),
    "before memory is shared": (process_group, "connect", _fail),
    "when memory is mapped": (connecting, "_all_do", _lose_a_rank),
    "with memory shared": (process_group.PacelineGroup, "_make_operations", _fail),
}


def open_descriptors() -> list[str]:
    """What descriptors of this process are; their numbers do not count."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    return sorted(found)


def fail_again_and_again(path: str, point: str) -> tuple[list[str], list[str]]:
    """Descriptors after the first attempts and after the last; nothing is collected.

    A peer may end before gloo has connected: that is another way to fail.
    """
    rank, store = int(os.environ["RANK"]), dist.FileStore(path, 2)  # type: ignore[attr-defined]
    found = []
    gc.disable()
    for attempt in range(ATTEMPTS):
        prefix = dist.PrefixStore(f"{attempt}", store)  # type: ignore[attr-defined]
        # Nobody dies here: the error need not wait for a second to see who has.
        at_once = mock.patch.object(lost_peers, "DEATH_WAIT_S", 0.1)
        with at_once, mock.patch.object(*POINTS[point]), contextlib.suppress(RuntimeError):
            process_group.PacelineGroup(prefix, rank, 2, timedelta(seconds=60))
            raise AssertionError("nothing failed")
        found.append(open_descriptors())
    return found[1], found[-1]


@pytest.mark.parametrize("point", POINTS)
def test_no_descriptor_stays(tmp_path: Path, point: str) -> None:
    for first, last in run_ranks(
        2, fail_again_and_again, str(tmp_path / "store"), point, init=False, timeout_s=200
    ):
        assert last == first
