"""Text that is fit to be shown."""

from __future__ import annotations

import pytest

from paceline.printable import listed, size_text


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


def test_sizes() -> None:
    sizes = (0, 999, 1000, 1 << 12, 1023 << 10, 300 << 20, 5 << 29, 3 << 40, 5 << 50)
    assert [size_text(size) for size in sizes] == [
        "0 B", "999 B", "0.977 KiB", "4 KiB", "0.999 MiB", "300 MiB", "2.5 GiB", "3 TiB",
        "5.12e+03 TiB",
    ]  # fmt: skip
