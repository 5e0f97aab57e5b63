"""A server's directory, let go as a kill does: without a last snapshot."""

from __future__ import annotations

from paceline.ps.storage.durable import Durable


def close_as_killed(durable: Durable) -> None:
    """Close the descriptors, and write nothing."""
    durable._journal.close()
    durable._directory.close()
