"""The heap in a rank's segment: zeroed, reachable by address, given back."""

from __future__ import annotations

import gc
import os

import torch

from paceline.memory.segment import Mapping, create_segment
from paceline.shm.core.arena import ALIGNMENT_BYTES, Arena

SIZE = 64 * ALIGNMENT_BYTES
HEAP = 4 * ALIGNMENT_BYTES


def make_mapping() -> Mapping:
    """Not a fixture: pytest would keep it, and the mapping, until after the check for leaks."""
    descriptor = create_segment("paceline-test", SIZE)
    try:
        return Mapping(descriptor, SIZE)
    finally:
        os.close(descriptor)


def make_arena() -> Arena:
    return Arena(make_mapping(), HEAP)


class TestArena:
    def test_memory_is_zeroed_and_where_it_says(self) -> None:
        mapping = make_mapping()
        arena = Arena(mapping, HEAP)
        tensor = arena.allocate(1000, torch.float64)
        assert tensor is not None
        assert tensor.shape == (1000,)
        assert not tensor.any()
        offset = arena.offset_of(tensor)
        assert offset == tensor.data_ptr() - mapping.address
        assert offset is not None
        assert offset >= HEAP
        tensor.fill_(3.0)
        raw = bytes(mapping.view(offset, 8000))
        assert torch.frombuffer(bytearray(raw), dtype=torch.float64).eq(3.0).all()

    def test_the_collector_may_give_back_in_the_middle_of_an_allocation(self) -> None:
        arena = make_arena()
        everything = arena.allocate(SIZE - HEAP, torch.uint8)
        assert everything is not None
        with arena._lock:
            del everything
            gc.collect()
        assert arena.allocate(SIZE - HEAP, torch.uint8) is not None

    def test_blocks_do_not_overlap(self) -> None:
        arena = make_arena()
        tensors = [
            arena.allocate(n, torch.uint8) for n in (1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1, 5)
        ]
        for number, tensor in enumerate(tensors):
            assert tensor is not None
            tensor.fill_(number + 1)
        assert [int(t.max()) for t in tensors if t is not None] == [1, 2, 3, 4]
        assert [int(t.min()) for t in tensors if t is not None] == [1, 2, 3, 4]

    def test_what_is_freed_is_handed_out_again_as_zeros(self) -> None:
        arena = make_arena()
        everything = SIZE - HEAP
        for _ in range(20):
            tensor = arena.allocate(everything, torch.uint8)
            assert tensor is not None
            assert not tensor.any()
            tensor.fill_(255)
            assert arena.allocate(1, torch.uint8) is None
            del tensor

    def test_neighbours_that_are_freed_are_joined(self) -> None:
        arena = make_arena()
        page = ALIGNMENT_BYTES
        tensors = [arena.allocate(page, torch.uint8) for _ in range((SIZE - HEAP) // page)]
        assert arena.allocate(1, torch.uint8) is None
        for first in (0, 1):  # every second one, then the others
            del tensors[first::2]
        tensors.clear()
        assert arena.allocate(SIZE - HEAP, torch.uint8) is not None

    def test_a_view_keeps_its_block(self) -> None:
        arena = make_arena()
        tensor = arena.allocate(SIZE - HEAP, torch.uint8)
        assert tensor is not None
        view = tensor[10:20]
        del tensor
        gc.collect()
        assert arena.allocate(1, torch.uint8) is None
        del view
        assert arena.allocate(1, torch.uint8) is not None

    def test_a_retired_arena_hands_nothing_out_twice(self) -> None:
        arena = make_arena()
        tensor = arena.allocate(SIZE - HEAP, torch.uint8)
        arena.retire()
        del tensor
        assert arena.allocate(1, torch.uint8) is None

    def test_empty_tensors(self) -> None:
        arena = make_arena()
        tensor = arena.allocate(0, torch.float32)
        assert tensor is not None
        assert tensor.shape == (0,)
        assert arena.offset_of(tensor) is not None

    def test_memory_elsewhere_is_not_in_it(self) -> None:
        arena = make_arena()
        assert arena.offset_of(torch.ones(3)) is None

    def test_a_tensor_outlives_the_arena(self) -> None:
        arena = make_arena()
        tensor = arena.allocate(10, torch.float32)
        assert tensor is not None
        del arena
        gc.collect()
        tensor.fill_(2.0)
        assert tensor.sum() == 20.0
