"""Bytes as numbers: the native core and torch write and read the same."""

from __future__ import annotations

import pytest
import torch

from paceline.ddp.agree import byte_sum as tails
from paceline.ddp.agree.byte_sum import read_bytes, write_bytes

EVERY_BYTE = bytearray(range(256))


def write_and_read() -> tuple[list[float], bytes, tuple[int, ...]]:
    flat = torch.full((300,), -1.0)
    numbers = flat[40:296]
    write_bytes(numbers, EVERY_BYTE)
    assert flat[39] == flat[296] == -1.0
    data, counts = read_bytes(numbers, 250)
    return numbers.tolist(), data, counts


def test_both_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found = write_and_read()
    assert found == ([float(n) for n in range(256)], bytes(range(250)), tuple(range(250, 256)))
    monkeypatch.setattr(tails, "native", None)
    assert write_and_read() == found


@pytest.mark.parametrize("number", [-1.0, 256.0, float("nan"), float("inf")])
def test_a_number_that_is_no_byte_is_an_error(number: float) -> None:
    numbers = torch.zeros(10)
    numbers[3] = number
    with pytest.raises((ValueError, OverflowError)):
        read_bytes(numbers, 10)
