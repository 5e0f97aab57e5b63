"""The plan: every parameter in one bucket, cut where torch cuts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.buckets import BucketCaps, BucketPlan, ParameterSpec, plan_buckets

MIB = 1024 * 1024
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


def spec(
    index: int,
    shape: tuple[int, ...] = (4,),
    dtype: torch.dtype = torch.float32,
    *,
    sparse: bool = False,
) -> ParameterSpec:
    stride = torch.empty(shape, device="meta").stride()
    return ParameterSpec(index, f"p{index}", shape, tuple(stride), dtype, CPU, sparse)


def indices(plan: BucketPlan) -> list[list[int]]:
    return [[member.index for member in bucket.parameters] for bucket in plan.buckets]


@st.composite
def parameter_specs(draw: st.DrawFn) -> list[ParameterSpec]:
    shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    entries = st.tuples(shapes, st.sampled_from(DTYPES), st.sampled_from([False, False, True]))
    drawn = draw(st.lists(entries, min_size=1, max_size=20))
    return [spec(i, shape, dtype, sparse=s) for i, (shape, dtype, s) in enumerate(drawn)]


caps_strategy = st.lists(st.integers(1, 400), min_size=1, max_size=3)


@given(parameter_specs(), caps_strategy, st.booleans())
def test_every_parameter_has_one_place(
    specs: list[ParameterSpec], caps: list[int], by_arrival: bool
) -> None:
    plan = plan_buckets(specs, caps, by_arrival=by_arrival)
    assert sorted(plan.order()) == list(range(len(specs)))
    for bucket in plan.buckets:
        places = [
            range(start, start + member.numel)
            for start, member in zip(bucket.offsets, bucket.parameters, strict=True)
        ]
        covered = [element for place in places for element in place]
        assert covered == list(range(bucket.numel)), "no gap, no overlap"
        assert bucket.nbytes == sum(member.nbytes for member in bucket.parameters)
        kinds = {(member.dtype, member.device, member.sparse) for member in bucket.parameters}
        assert len(kinds) == 1
        assert not bucket.sparse or len(bucket.parameters) == 1


@given(parameter_specs(), caps_strategy)
def test_a_bucket_is_closed_as_soon_as_its_cap_is_reached(
    specs: list[ParameterSpec], caps: list[int]
) -> None:
    plan = plan_buckets(specs, caps, by_arrival=True)
    last_of_kind = {}
    for number, bucket in enumerate(plan.buckets):
        last_of_kind[bucket.dtype, bucket.sparse] = number
    for number, bucket in enumerate(plan.buckets):
        if bucket.sparse:
            continue
        without_last = sum(member.nbytes for member in bucket.parameters[:-1])
        assert without_last < bucket.cap_bytes
        if number != last_of_kind[bucket.dtype, False]:
            assert bucket.nbytes >= bucket.cap_bytes


@given(parameter_specs(), caps_strategy)
def test_the_same_groups_as_torch(specs: list[ParameterSpec], caps: list[int]) -> None:
    tensors = [torch.empty(member.shape, dtype=member.dtype) for member in specs]
    sparse = [member.sparse for member in specs]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps, sparse)
    found = indices(plan_buckets(specs, caps, by_arrival=True))
    assert sorted(found) == sorted(expected)


@given(parameter_specs(), caps_strategy, st.randoms(use_true_random=False))
def test_the_same_groups_as_torch_in_an_order_of_arrival(
    specs: list[ParameterSpec], caps: list[int], random: object
) -> None:
    order = list(range(len(specs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    arrived = [specs[index] for index in order]
    tensors = [torch.empty(member.shape, dtype=member.dtype) for member in arrived]
    sparse = [member.sparse for member in specs]  # torch looks it up by index
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps, sparse, order)
    found = indices(plan_buckets(arrived, caps, by_arrival=True))
    assert sorted(found) == sorted(expected)


@given(parameter_specs(), caps_strategy)
def test_buckets_start_in_the_order_in_which_they_fill(
    specs: list[ParameterSpec], caps: list[int]
) -> None:
    arriving = plan_buckets(specs, caps, by_arrival=True)
    filled_at = [max(member.index for member in b.parameters) for b in arriving.buckets]
    assert filled_at == sorted(filled_at)
    defined = plan_buckets(specs, caps, by_arrival=False)
    assert sorted(indices(defined)) == sorted(indices(arriving)), "the same groups"
    assert defined.buckets == tuple(reversed(arriving.buckets)), "the last layer's first"


@given(parameter_specs(), caps_strategy)
def test_digest(specs: list[ParameterSpec], caps: list[int]) -> None:
    plan = plan_buckets(specs, caps, by_arrival=True)
    assert plan.digest == plan_buckets(list(specs), tuple(caps), by_arrival=True).digest
    elsewhere = [dataclasses.replace(member, device=torch.device("meta")) for member in specs]
    assert plan.digest == plan_buckets(elsewhere, caps, by_arrival=True).digest, "devices differ"
    renamed = [*specs[:-1], dataclasses.replace(specs[-1], name="other")]
    assert plan.digest != plan_buckets(renamed, caps, by_arrival=True).digest


class TestDigest:
    def test_tells_other_shapes_dtypes_orders_and_cuts_apart(self) -> None:
        base = [spec(0, (2, 3)), spec(1, (6,)), spec(2, (1,))]
        others = [
            plan_buckets([spec(0, (3, 2)), *base[1:]], [100], by_arrival=True),
            plan_buckets([spec(0, (2, 3), torch.float64), *base[1:]], [100], by_arrival=True),
            plan_buckets([spec(0, (2, 3), sparse=True), *base[1:]], [100], by_arrival=True),
            plan_buckets([base[1], base[0], base[2]], [100], by_arrival=True),
            plan_buckets(base, [1], by_arrival=True),
            plan_buckets(base, [1], by_arrival=False),
            plan_buckets(base[:2], [100], by_arrival=True),
        ]
        digests = {plan.digest for plan in others}
        digests.add(plan_buckets(base, [100], by_arrival=True).digest)
        assert len(digests) == len(others) + 1

    def test_tells_other_strides_apart(self) -> None:
        """Two ranks whose gradients lie in memory differently must not add them up."""
        row_major = spec(0, (2, 3))
        column_major = dataclasses.replace(row_major, stride=(1, 2))
        plans = [plan_buckets([each], [100], by_arrival=True) for each in (row_major, column_major)]
        assert plans[0].digest != plans[1].digest


class TestCaps:
    def test_defaults(self) -> None:
        caps = BucketCaps.from_megabytes(None, None)
        assert caps.rebuilt() == (1 * MIB, 25 * MIB)
        assert caps.initial(order_unknown=False) == (1 * MIB, 25 * MIB)

    def test_one_bucket_while_the_order_is_unknown(self) -> None:
        caps = BucketCaps.from_megabytes(1e-6, None)
        specs = [spec(i, (1000,)) for i in range(5)]
        plan = plan_buckets(specs, caps.initial(order_unknown=True), by_arrival=False)
        assert len(plan.buckets) == 1

    @pytest.mark.parametrize(("megabytes", "expected"), [(3, 3 * MIB), (0.5, MIB // 2)])
    def test_a_given_cap_holds_for_the_first_bucket_too(
        self, megabytes: float, expected: int
    ) -> None:
        assert set(BucketCaps.from_megabytes(megabytes, None).rebuilt()) == {expected}

    def test_a_list(self) -> None:
        caps = BucketCaps.from_megabytes(25, [1, 2, 0.5])
        assert caps.rebuilt() == (MIB, 2 * MIB, MIB // 2)
        assert caps.initial(order_unknown=True) == caps.rebuilt()


class TestParameterSpec:
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.empty(2, 3),
            torch.empty(2, 3).t(),
            torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.empty(2, 3, 4).permute(2, 0, 1),
            torch.empty(()),
            torch.empty(0, 3),
            torch.empty(3, 0),
            torch.empty(1, 4),
            torch.empty(4, 1, 1, 3).to(memory_format=torch.channels_last),
            torch.empty(6, 8)[::2],
            torch.empty(6, 8)[:, ::2],
            torch.empty(3, 1).expand(3, 4),
        ],
        ids=lambda tensor: f"{tuple(tensor.shape)}, {tensor.stride()}",
    )
    def test_stride_is_that_of_the_gradient_that_autograd_makes(self, tensor: torch.Tensor) -> None:
        parameter = tensor.detach().requires_grad_()
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        if parameter.numel() == 0:
            return  # any stride will do
        found = ParameterSpec.of(0, "p", parameter)
        dense = torch.empty_like(parameter).stride()
        sizes = parameter.shape
        # The stride of a dimension of one element means nothing.
        assert [s for s, n in zip(found.stride, sizes, strict=True) if n > 1] == [
            s for s, n in zip(dense, sizes, strict=True) if n > 1
        ]

    def test_dtype_may_be_overridden(self) -> None:
        found = ParameterSpec.of(3, "p", torch.empty(2, 3), dtype=torch.float16)
        assert (found.dtype, found.numel, found.nbytes) == (torch.float16, 6, 12)
