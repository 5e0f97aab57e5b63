"""Segments: shared between mappings, checked before they are mapped, of a size that is sealed."""

from __future__ import annotations

import mmap
import os

import pytest

from paceline.memory.segment import Mapping, check_segment, create_segment

SIZE = 64 * mmap.PAGESIZE


def test_its_size_is_sealed() -> None:
    descriptor = create_segment("paceline-test", SIZE)
    try:
        for size in (mmap.PAGESIZE, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        check_segment(descriptor, SIZE)
    finally:
        os.close(descriptor)


def test_what_a_peer_sends_is_checked() -> None:
    descriptor = create_segment("paceline-test", SIZE)
    plain = os.memfd_create("paceline-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, SIZE)
    try:
        with pytest.raises(ValueError, match=f"{SIZE} bytes instead of {2 * SIZE}"):
            check_segment(descriptor, 2 * SIZE)
        with pytest.raises(ValueError, match="shrunk"):
            check_segment(plain, SIZE)
    finally:
        os.close(descriptor)
        os.close(plain)


def test_two_mappings_see_each_other() -> None:
    descriptor = create_segment("paceline-test", SIZE)
    one, two = Mapping(descriptor, SIZE), Mapping(descriptor, SIZE)
    os.close(descriptor)
    one.view(100, 1)[0] = 7
    assert two.view(100, 1)[0] == 7
