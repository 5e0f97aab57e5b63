"""What the README says about torch's DDP is what the script shows."""

from __future__ import annotations

import pytest

from benchmarks.torch_hangs import VICTIM, observed

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]


def outcomes(wrapper: str, fault: str, timeout_s: float) -> list[str]:
    rows = observed(wrapper, fault, timeout_s)
    return [row["outcome"] for row in rows if row["rank"] != VICTIM]


def test_gloo_raises_when_sockets_close() -> None:
    for outcome in outcomes("torch", "killed", 120.0):
        assert outcome.startswith("RuntimeError")
        assert "Timed out" not in outcome
        assert "rank 1" not in outcome


def test_gloo_waits_while_sockets_stay_open() -> None:
    assert any("Timed out" in outcome for outcome in outcomes("torch", "stopped", 25.0))


def test_paceline_names_the_rank() -> None:
    for outcome in outcomes("paceline", "killed", 120.0):
        assert outcome.startswith("PeerLostError")
        assert "rank 1 (pid" in outcome


def test_paceline_names_what_the_ranks_wait_for() -> None:
    for outcome in outcomes("paceline", "elsewhere", 120.0):
        assert outcome.startswith("CollectiveMismatchError")
