"""Servers for attacks come from the same fork server as in ``tests/ps``."""

from __future__ import annotations

from tests.ps.conftest import fork_server, start_servers

__all__ = ["fork_server", "start_servers"]
