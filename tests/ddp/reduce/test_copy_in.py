"""Hooks that copy gradients in ([Note: warm gradients] in hooks.py): what they take and leave.

Each case is a parameter with a gradient and a slot in a bucket; the hook is called by hand.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.buckets import BucketSpec, ParameterSpec
from paceline.buckets.bucket import Bucket
from paceline.ddp.autograd.hooks import PythonReadyQueue
from paceline.native.extension import native
from paceline.testing import run_ranks
from paceline.torch_private.autograd import tensor_exchange
from tests.ddp.compare import batch

pytestmark = pytest.mark.skipif(native is None, reason="needs the native core: a C compiler")
FACTOR = 1.0 / 3.0
LARGE = 3 * (1 << 15) + 5  # elements: more than 128 KiB, and no whole number of lines


class OwnTensor(torch.Tensor):
    """A subclass, which may mean anything by its data."""


@dataclass
class Case:
    """A parameter in a bucket, and a queue whose hooks copy it."""

    parameter: torch.Tensor
    bucket: Bucket
    queue: native.ReadyQueue

    @property
    def view(self) -> torch.Tensor:
        view = self.bucket.slots[0].view
        assert view is not None
        return view

    def arrive(self) -> bool:
        """Call the hook; say whether the gradient was copied in."""
        self.queue.make_hook(0, 0)()
        arrived, left = self.queue.take()
        assert arrived == [0]
        assert left in ([], [0])
        return not left


def case(parameter: torch.Tensor, *, dtype: torch.dtype | None = None, before: int = 3) -> Case:
    """Make a bucket with ``before`` elements in front of the parameter's slot."""
    spec = ParameterSpec.of(0, "weight", parameter, dtype=dtype)
    bucket = Bucket(0, BucketSpec((spec,), 0), [parameter], trailer_numel=before)
    memory = torch.full((bucket.total_numel,), 7.0, dtype=spec.dtype)
    bucket.attach(memory)
    bucket.slots[0].view = memory.as_strided(spec.shape, spec.stride, before)
    queue = native.ReadyQueue(lambda: None, 1 << 30, tensor_exchange())
    queue.due = 1 << 30
    assert queue.start_copying([bucket.slots[0]], FACTOR)
    return Case(parameter, bucket, queue)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


SHAPES = [(), (1,), (0,), (5, 0), (3, 4), (1, 4, 1), (2, 3, 4, 5), (LARGE,), (LARGE // 7, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("before", [0, 3])
def test_a_fresh_gradient_becomes_the_view(shape: tuple[int, ...], before: int) -> None:
    made = case(nn.Parameter(torch.ones(shape)), before=before)
    gradient = torch.randn(shape)
    made.parameter.grad = gradient.clone()
    assert made.arrive()
    assert made.parameter.grad is made.view
    assert same_bits(made.view, gradient * FACTOR)
    memory = made.bucket.flat
    assert memory is not None
    assert bool((memory[:before] == 7.0).all()), "nothing beside the slot is written"
    assert bool((memory[before + gradient.numel() :] == 7.0).all())


def test_what_is_not_finite_and_what_is_tiny_has_torchs_bits() -> None:
    made = case(nn.Parameter(torch.ones(6)))
    gradient = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 1e-39])
    made.parameter.grad = gradient.clone()
    assert made.arrive()
    assert same_bits(made.view, gradient * FACTOR)


@pytest.mark.parametrize("shape", [(3, 4), (LARGE,)])
def test_one_that_is_the_view_already_is_scaled(shape: tuple[int, ...]) -> None:
    made = case(nn.Parameter(torch.ones(shape)))
    gradient = torch.randn(shape)
    made.view.copy_(gradient)
    made.parameter.grad = made.view
    assert made.arrive()
    assert made.parameter.grad is made.view
    assert same_bits(made.view, gradient * FACTOR)


def test_the_memory_of_the_gradient_is_free_then() -> None:
    made = case(nn.Parameter(torch.ones(LARGE)))
    made.parameter.grad = gradient = torch.randn(LARGE)
    references = sys.getrefcount(gradient)
    assert made.arrive()
    assert sys.getrefcount(gradient) < references


def test_strides_of_the_parameter_are_kept() -> None:
    parameter = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    made = case(parameter)
    gradient = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    parameter.grad = gradient.clone()
    assert made.arrive()
    assert torch.equal(made.view, gradient * FACTOR)
    assert made.view.stride() == parameter.stride()


def plain() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


LEFT: dict[str, Callable[[], torch.Tensor | None]] = {
    "none": lambda: None,
    "other strides": lambda: plain().t().contiguous().t(),
    "with a graph": lambda: plain().requires_grad_() * 1,
    "a leaf": lambda: plain().requires_grad_(),
    "a subclass": lambda: plain().as_subclass(OwnTensor),
    "negated lazily": lambda: torch._neg_view(plain()),
    "sparse": lambda: plain().to_sparse(),
    "expanded": lambda: torch.ones(1, 4).expand(3, 4),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_not_as_usual_is_left_untouched(kind: str) -> None:
    made = case(nn.Parameter(torch.ones(3, 4)))
    gradient = LEFT[kind]()
    made.parameter.grad = gradient
    assert not made.arrive()
    assert made.parameter.grad is gradient
    assert bool((made.view == 7.0).all())


def test_another_dtype_than_the_buckets_is_left() -> None:
    made = case(nn.Parameter(torch.ones(3, 4, dtype=torch.float64)), dtype=torch.float32)
    made.parameter.grad = torch.ones(3, 4, dtype=torch.float64)
    assert not made.arrive()
    made = case(nn.Parameter(torch.ones(3, 4)), dtype=torch.bfloat16)
    made.parameter.grad = torch.ones(3, 4)
    assert not made.arrive()


def test_a_bucket_without_memory_is_left() -> None:
    made = case(nn.Parameter(torch.ones(3)))
    made.parameter.grad = gradient = torch.ones(3)
    made.bucket.detach()
    assert not made.arrive()
    assert made.parameter.grad is gradient


def test_only_while_it_is_open_and_only_what_has_a_slot() -> None:
    made = case(nn.Parameter(torch.ones(3)))
    made.parameter.grad = torch.ones(3)
    made.queue.stop_copying()
    assert not made.arrive()
    made.queue.start_copying([None], FACTOR)
    assert not made.arrive()
    made.queue.start_copying([], FACTOR)
    assert not made.arrive()
    made.queue.start_copying([made.bucket.slots[0]], FACTOR)
    made.parameter.grad = None
    made.queue.make_hook(0, 0)()
    made.parameter.grad = torch.ones(3)
    made.queue.make_hook(0, 0)()
    assert made.queue.take() == ([0, 0], [0]), "what was left is told apart"


def test_each_is_brought_in_once_and_what_is_withheld_not_at_all() -> None:
    made = case(nn.Parameter(torch.ones(3)))
    slots = [made.bucket.slots[0]]
    made.queue.start_copying(slots, FACTOR)
    made.parameter.grad = torch.ones(3)
    assert made.arrive()
    before = made.view.clone()
    assert not made.arrive(), "its bucket may be on its way"
    assert torch.equal(made.view, before)
    assert slots == [made.bucket.slots[0]], "the list of the caller stays as it is"
    made.queue.start_copying(slots, FACTOR)
    made.queue.exclude(0)
    assert not made.arrive()
    with pytest.raises(IndexError):
        made.queue.exclude(1)
    made.queue.stop_copying()
    made.queue.exclude(1)  # no hook copies


def test_without_dlpack_and_without_the_core_nothing_is_brought_in() -> None:
    made = case(nn.Parameter(torch.ones(3)))
    queue = native.ReadyQueue(lambda: None, 1 << 30, None)
    assert not queue.start_copying([made.bucket.slots[0]], FACTOR)
    assert not PythonReadyQueue(lambda: None, 1 << 30).start_copying([made.bucket.slots[0]], FACTOR)
    with pytest.raises(ValueError, match="PyCapsule"):
        native.ReadyQueue(lambda: None, 1 << 30, object())


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
    factor=st.floats(2**-30, 2.0, width=32),
    seed=st.integers(0, 1000),
)
def test_any_dense_layout(shape: tuple[int, ...], order: object, factor: float, seed: int) -> None:
    """Whatever the parameter's strides, a gradient that has them too is copied in."""
    axes = list(range(len(shape)))
    order.shuffle(axes)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randn([shape[axis] for axis in axes], generator=generator)
    back = [axes.index(axis) for axis in range(len(shape))]
    made = case(nn.Parameter(torch.zeros_like(stored).permute(back)))
    made.queue.start_copying([made.bucket.slots[0]], factor)
    gradient = stored.permute(back)
    made.parameter.grad = gradient.clone(memory_format=torch.preserve_format)
    is_copied = made.arrive()
    assert is_copied == (made.parameter.grad is made.view)
    if made.parameter.grad is made.view:
        assert same_bits(made.view, gradient * factor)
    else:
        assert made.view.stride() != gradient.stride()


def test_steps_that_mix_both_ways_have_the_bits_of_one_way() -> None:
    """Users replace some gradients in hooks of their own; others arrive as usual."""

    def gradients_of(model: nn.Module, *, mixes: bool) -> list[torch.Tensor]:
        handles = []
        if mixes:
            for index, parameter in enumerate(model.parameters()):
                if index % 3 == 0:
                    handles.append(parameter.register_post_accumulate_grad_hook(_transpose_storage))
        for step in range(4):
            model.zero_grad(set_to_none=step % 2 == 0)
            model(batch(step)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def on_rank() -> bool:
        torch.manual_seed(0)
        sizes = [4, 300, 300, 7, 4]
        first = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])
        second = copy.deepcopy(first)
        plain_gradients = gradients_of(DDP(first), mixes=False)
        mixed = gradients_of(DDP(second), mixes=True)
        return all(map(torch.equal, plain_gradients, mixed))

    assert run_ranks(3, on_rank) == [True] * 3


def _transpose_storage(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.dim() == 2:
        parameter.grad = parameter.grad.t().contiguous().t()
