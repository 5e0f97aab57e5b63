"""Two servers and a connection for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline import ps
from paceline.ps.client import table_set as module_tables
from paceline.testing import warm_up


@pytest.fixture(scope="module")
def servers() -> Iterator[ps.Servers]:
    warm_up()
    with ps.local(2, start_method="forkserver") as local, ps.connect(local) as connection:
        yield connection


@pytest.fixture
def every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" pool on servers also where so few bytes are not worth it."""
    monkeypatch.setattr(module_tables, "WORTH_BYTES", 0)
