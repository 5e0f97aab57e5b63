"""Replica threads end by themselves after a while; tests do not wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.dp.replica_threads import POOL


@pytest.fixture(autouse=True)
def crews_end_with_the_test() -> Iterator[None]:
    yield
    POOL.end_all()
