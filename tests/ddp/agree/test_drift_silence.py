"""What is right in torch's DDP must not be taken for drift: warnings are errors in these ranks.

All patterns run in the same ranks, one after the other. A pattern that raises or warns is named.
"""

from __future__ import annotations

import pytest

from paceline.testing import run_ranks
from tests.ddp.agree import drift_patterns_of_gradients, drift_patterns_of_weights  # noqa: F401
from tests.ddp.agree.drift_pattern import PATTERNS


@pytest.mark.parametrize(
    ("transport", "ranks"),
    [
        ("shm", 3),
        pytest.param("c10d", 2, marks=pytest.mark.slow),
        pytest.param("shm", 2, marks=pytest.mark.slow),
        pytest.param("c10d", 3, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_said(transport: str, ranks: int) -> None:
    def on_rank() -> None:
        for name, train in PATTERNS.items():
            try:
                train(transport)
            except Exception as error:
                raise AssertionError(f"in the pattern {name}: {error}") from error

    run_ranks(ranks, on_rank, timeout_s=250)
