"""Text that is fit to be shown."""

from __future__ import annotations

import pytest

from paceline.printable import listed


@pytest.mark.parametrize(
    ("names", "most", "told"),
    [
        ([], 2, ""),
        (["a"], 1, "a"),
        (("a", "b"), 2, "a, b"),
        (["a", "b", "c"], 1, "a and 2 more"),
        ([1, 2, 3], 2, "1, 2 and 1 more"),
    ],
)
def test_long_lists_end_with_how_many_more(names: list[object], most: int, told: str) -> None:
    assert listed(names, most) == told
