"""Servers for tests: from the fork server that ranks come from, so torch is there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline import ps
from paceline.native import extension
from paceline.testing import warm_up


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Started by run_ranks' own preload, whichever test comes first."""
    warm_up()


@pytest.fixture
def start_servers(fork_server: None) -> Iterator[Callable[..., ps.LocalServers]]:
    """``ps.local`` whose servers end with the test."""
    started: list[ps.LocalServers] = []

    def start(n: int = 1, **options: Any) -> ps.LocalServers:
        started.append(ps.local(n, start_method="forkserver", **options))
        return started[-1]

    yield start
    for servers in started:
        servers.close()


@pytest.fixture(scope="module", params=["native", "python"])
def either_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Stores with the native core, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(extension, "native", None)
        elif extension.native is None:
            pytest.skip("needs the native core: a C compiler, and PACELINE_DISABLE_NATIVE unset")
        yield request.param
