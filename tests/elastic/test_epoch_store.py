"""The store of an epoch on one host: as ``dist.Store`` has it, and nobody waits for the dead."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.elastic.epoch_store import open_store
from paceline.elastic.epoch_watch import watch_epoch
from paceline.elastic.protocol import DIRECTORY


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    yield [open_store(3, 2) for _ in range(2)]
    watch_epoch(None)


def test_ranks_see_what_others_set(stores: list[Any]) -> None:
    one, other = stores
    one.set("a", "x")
    assert other.get("a") == b"x"
    assert other.add("n", 2) == 2
    assert one.add("n", 3) == 5
    assert one.compare_set("a", "x", "y") == b"y"
    assert one.check(["a", "n"])
    assert not one.check(["a", "b"])
    assert other.delete_key("a")
    assert not one.check(["a"])
    with pytest.raises(dist.DistStoreError, match=r"\['b'\] did not come for 0 s"):
        one.wait(["b"], datetime.timedelta(0))


@pytest.mark.parametrize("how", ["wait", "get", "a group"])
def test_who_waits_is_woken_when_the_epoch_is_over(stores: list[Any], how: str) -> None:
    over, errors = threading.Event(), []

    def wait() -> None:
        store = dist.PrefixStore("group", stores[0])  # as groups see it
        try:
            if how == "wait":
                stores[0].wait(["b"])
            elif how == "get":
                stores[0].get("b")
            else:
                dist.ProcessGroupGloo(store, 0, 2, datetime.timedelta(minutes=30))
        except Exception as error:
            errors.append(error)

    watch_epoch(over.is_set)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert "the epoch is over" in str(errors[0])
