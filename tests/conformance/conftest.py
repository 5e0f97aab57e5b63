"""One test server for all of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .client import Client


@pytest.fixture(scope="package")
def client() -> Iterator[Client]:
    """Run torch's tests on the class that CONFORMANCE_CLASS names, ours unless told otherwise."""
    with Client(os.environ.get("CONFORMANCE_CLASS", "paceline")) as running:
        yield running
