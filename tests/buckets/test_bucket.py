"""One bucket: its memory, its views, and whether somebody still holds them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.buckets import Bucket, GradBucket, ParameterSpec, plan_buckets


def make(parameters: list[Tensor], *, trailer_numel: int = 0, **options: Any) -> Bucket:
    specs = [ParameterSpec.of(i, f"p{i}", p) for i, p in enumerate(parameters)]
    (spec,) = plan_buckets(specs, [1 << 40], by_arrival=True).buckets
    return Bucket(0, spec, parameters, trailer_numel=trailer_numel, **options)


def attached(parameters: list[Tensor], **options: Any) -> Bucket:
    bucket = make(parameters, **options)
    bucket.attach(torch.zeros(bucket.total_numel))
    return bucket


def parameters_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


class TestMemory:
    def test_views_are_disjoint_and_in_order(self) -> None:
        bucket = attached(parameters_of((2, 3), (), (0, 4), (5,)), trailer_numel=3)
        assert bucket.total_numel == 6 + 1 + 0 + 5 + 3
        for number, slot in enumerate(bucket.slots):
            assert slot.view is not None
            slot.view.fill_(number + 1)
        assert bucket.flat is not None
        assert bucket.flat.tolist() == [1] * 6 + [2] + [4] * 5 + [0] * 3

    def test_gradients_and_tail_share_the_flat(self) -> None:
        bucket = attached(parameters_of((4,)), trailer_numel=2)
        assert bucket.flat is not None
        assert bucket.gradients is not None
        assert bucket.trailer is not None
        bucket.gradients.fill_(1)
        bucket.trailer.fill_(2)
        assert bucket.flat.tolist() == [1, 1, 1, 1, 2, 2]

    def test_views_have_the_strides_of_their_parameters(self) -> None:
        conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last).weight
        transposed = nn.Parameter(torch.randn(3, 5).t())
        bucket = attached([conv, transposed])
        for slot, parameter in zip(bucket.slots, (conv, transposed), strict=True):
            assert slot.view is not None
            assert slot.view.shape == parameter.shape
            assert slot.view.stride() == parameter.stride()

    def test_memory_with_an_offset(self) -> None:
        """A transport may hand out a part of a larger block."""
        bucket = make(parameters_of((2,), (3,)))
        block = torch.zeros(20)
        bucket.attach(block[7 : 7 + bucket.total_numel])
        for slot in bucket.slots:
            assert slot.view is not None
            slot.view.fill_(1)
        assert block.nonzero().flatten().tolist() == [7, 8, 9, 10, 11]

    def test_detach_lets_go(self) -> None:
        bucket = attached(parameters_of((4,)))
        memory = weakref.ref(bucket.flat)
        bucket.detach()
        gc.collect()
        assert memory() is None
        assert bucket.slots[0].view is None
        assert bucket.flat is bucket.gradients is bucket.trailer is None

    def test_detached_gradients_live_on(self) -> None:
        (parameter,) = parameters_of((4,))
        bucket = attached([parameter])
        parameter.grad = bucket.slots[0].view
        assert parameter.grad is not None
        parameter.grad.fill_(3)
        bucket.detach()
        assert parameter.grad.tolist() == [3, 3, 3, 3]


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda view: view,
    "row": lambda view: view[0],
    "detached": lambda view: view.detach(),
    "flat": lambda view: view.view(-1),
    "numpy": lambda view: view.numpy(),
    "storage": lambda view: view.untyped_storage(),
    "list": lambda view: [view],
}


class TestHeld:
    def test_nobody(self) -> None:
        bucket = attached(parameters_of((2, 2), (3,)))
        assert not bucket.is_held()

    def test_not_without_memory(self) -> None:
        assert not make(parameters_of((2, 2))).is_held()

    def test_not_by_being_a_parameters_gradient(self) -> None:
        parameters = parameters_of((2, 2), (3,))
        bucket = attached(parameters)
        for slot, parameter in zip(bucket.slots, parameters, strict=True):
            parameter.grad = slot.view
        assert not bucket.is_held()
        for parameter in parameters:
            parameter.grad = None
        assert not bucket.is_held()

    @pytest.mark.parametrize("how", HOLDS)
    def test_by_a_user(self, how: str) -> None:
        parameters = parameters_of((2, 2), (3, 1))
        bucket = attached(parameters)
        for slot, parameter in zip(bucket.slots, parameters, strict=True):
            parameter.grad = slot.view
        kept = HOLDS[how](parameters[1].grad)
        for parameter in parameters:
            parameter.grad = None
        assert bucket.is_held()
        del kept
        assert not bucket.is_held()

    def test_after_new_memory(self) -> None:
        bucket = attached(parameters_of((2, 2)))
        kept = bucket.slots[0].view
        assert bucket.is_held()
        bucket.detach()
        bucket.attach(torch.zeros(bucket.total_numel))
        assert not bucket.is_held()
        assert kept is not None


class TestGradBucket:
    """What a hook sees; the methods are those of torch's class."""

    def test_views(self) -> None:
        parameters = parameters_of((2, 3), (4,))
        bucket = attached(parameters, trailer_numel=5)
        assert bucket.gradients is not None
        seen = GradBucket(bucket, bucket.gradients, is_last=True)
        assert seen.index() == 0
        assert seen.is_last()
        assert seen.buffer().numel() == 10, "without the trailer"
        assert all(a is b for a, b in zip(seen.parameters(), parameters, strict=True))
        seen.buffer().copy_(torch.arange(10.0))
        first, second = seen.gradients()
        assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert second.tolist() == [6, 7, 8, 9]

    def test_set_buffer(self) -> None:
        bucket = attached(parameters_of((2, 2), (3,)))
        assert bucket.gradients is not None
        seen = GradBucket(bucket, bucket.gradients, is_last=False)
        seen.set_buffer(torch.arange(7.0))
        assert seen.gradients()[1].tolist() == [4, 5, 6]
        assert bucket.gradients.tolist() == [0] * 7
        with pytest.raises(ValueError, match="7 elements"):
            seen.set_buffer(torch.zeros(6))
