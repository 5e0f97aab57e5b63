"""A model that differs between ranks, or changes, has an error of its own on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline import PacelineError
from paceline.errors import (
    GradientMismatchError,
    ModelMismatchError,
    ParametersChangedError,
)
from paceline.testing import run_ranks
from tests.ddp.agree.error_cases import (
    Gradients,
    Net,
    batch,
    error_of,
    expected,
    good_step,
    mentions,
)


class TestModelDiffers:
    """Found at construction. Afterwards the group is usable: a good model can be wrapped."""

    @staticmethod
    def construct(
        build: Callable[[int], nn.Module], options: Callable[[int], dict[str, Any]] | None = None
    ) -> list[Exception | None]:
        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            error = error_of(lambda: DDP(build(rank), **(options(rank) if options else {})))
            return error, good_step(DDP(Net()))

        results = run_ranks(3, run)
        for error, after in results:
            assert isinstance(error, ModelMismatchError)
            torch.testing.assert_close(after, expected(3))
        return [error for error, _ in results]

    def test_in_a_shape(self) -> None:
        for error in self.construct(lambda rank: nn.Linear(4, 5 if rank == 2 else 3)):
            assert mentions(error, "'weight'", "[3, 4]", "[5, 4]", "rank 0", "rank 2")
            assert mentions(error, "same model on every rank")
            assert (error.rank, error.parameters) == (2, ("weight",))

    def test_in_a_dtype(self) -> None:
        def build(rank: int) -> nn.Module:
            return nn.Linear(4, 3, dtype=torch.float64 if rank == 1 else torch.float32)

        for error in self.construct(build):
            assert mentions(error, "'weight'", "float32", "float64", "rank 0", "rank 1")

    def test_in_strides(self) -> None:
        def build(rank: int) -> nn.Module:
            net = nn.Conv2d(2, 4, 3)
            return net.to(memory_format=torch.channels_last) if rank == 1 else net

        for error in self.construct(build):
            assert mentions(error, "'weight'", "stride", "rank 0", "rank 1")

    @pytest.mark.parametrize("longer", [0, 2])
    def test_in_the_number_of_parameters(self, longer: int) -> None:
        def build(rank: int) -> nn.Module:
            layers = 3 if rank == longer else 2
            return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

        for error in self.construct(build):
            assert mentions(error, "2.weight", "2.bias", f"Only rank {longer}", "6", "4")

    def test_in_the_order(self) -> None:
        def build(rank: int) -> nn.Module:
            names = ["a", "b"] if rank == 0 else ["b", "a"]
            return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

        for error in self.construct(build):
            assert mentions(error, "'a.weight'", "'b.weight'", "rank 0", "rank 1")

    def test_in_an_extra_parameter(self) -> None:
        def build(rank: int) -> nn.Module:
            net = nn.Module()
            net.first = nn.Parameter(torch.ones(2))
            if rank == 1:
                net.extra = nn.Parameter(torch.ones(2))
            net.last = nn.Parameter(torch.ones(2))
            return net

        for error in self.construct(build):
            assert mentions(error, "extra", "Rank 0", "rank 1", "requires_grad")

    def test_in_what_is_trained(self) -> None:
        def build(rank: int) -> nn.Module:
            net = nn.Linear(4, 4)
            net.bias.requires_grad_(rank != 1)
            return net

        for error in self.construct(build):
            assert mentions(error, "bias", "Only rank 0", "rank 1")

    @pytest.mark.parametrize(
        ("argument", "values"),
        [
            ("bucket_cap_mb", (25, 1)),
            ("find_unused_parameters", (False, True)),
            ("static_graph", (False, True)),
            ("nonfinite", ("ignore", "skip")),
            ("missing_gradients", ("raise", "wait")),
        ],
    )
    def test_in_an_argument(self, argument: str, values: tuple[Any, Any]) -> None:
        name = "bucket" if argument == "bucket_cap_mb" else argument
        for error in self.construct(
            lambda rank: Net(), lambda rank: {argument: values[int(rank == 1)]}
        ):
            assert mentions(error, name, "on rank 0", "on rank 1", "same arguments on every rank")
            if argument != "bucket_cap_mb":
                assert mentions(error, values[0], values[1])


class TestPlanDiffers:
    """With ``init_sync=False`` nothing is compared at construction, but the first backward does."""

    def test_model_differs(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(nn.Linear(4, 3 + dist.get_rank()), init_sync=False)
            error = error_of(lambda: ddp(torch.ones(1, 4)).sum().backward())
            return error, good_step(DDP(Net()))

        for error, after in run_ranks(2, run):
            assert isinstance(error, ModelMismatchError)
            assert mentions(error, "rank 0", "rank 1", "weight", "[3, 4]", "[4, 4]")
            torch.testing.assert_close(after, expected(2))

    def test_bucket_size_differs(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            cap = (1e-6, 25)[dist.get_rank()]
            ddp = DDP(Net(), init_sync=False, bucket_cap_mb=cap, find_unused_parameters=True)
            error = error_of(lambda: ddp(batch(0)).sum().backward())
            return error, good_step(DDP(Net()))

        for error, after in run_ranks(2, run):
            assert isinstance(error, ModelMismatchError)
            assert mentions(error, "bucket", "rank 0", "rank 1")
            torch.testing.assert_close(after, expected(2))

    def test_same_plan_is_fine(self) -> None:
        def run() -> Gradients:
            return good_step(DDP(Net(), init_sync=False))

        for found in run_ranks(2, run):
            torch.testing.assert_close(found, expected(2))


class TestModuleChanged:
    def test_parameter_added_after_construction(self) -> None:
        def run() -> tuple[Exception | None, Exception | None, Gradients]:
            ddp = DDP(Net())
            good_step(ddp)
            ddp.module.left.extra = nn.Parameter(torch.ones(2))
            on_parameter = error_of(lambda: ddp(batch(0)))
            del ddp.module.left.extra
            ddp.module.added = nn.Linear(2, 2)
            on_module = error_of(lambda: ddp(batch(0)))
            del ddp.module.added
            return on_parameter, on_module, good_step(ddp)

        for on_parameter, on_module, after in run_ranks(2, run):
            assert isinstance(on_parameter, ParametersChangedError)
            assert on_parameter.parameters == ("left.extra",)
            assert mentions(on_parameter, "left.extra", "wrap the module in a new")
            assert isinstance(on_module, ParametersChangedError)
            assert on_module.parameters == ("added.weight", "added.bias")
            torch.testing.assert_close(after, expected(2))

    def test_parameter_replaced_after_construction(self) -> None:
        """Same name, another tensor: it would never be reduced."""

        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net())
            good_step(ddp)
            old = ddp.module.left.weight
            ddp.module.left.weight = nn.Parameter(torch.zeros(2, 4))
            error = error_of(lambda: good_step(ddp))
            ddp.module.left.weight = old
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, PacelineError)
            assert mentions(error, "left.weight")
            torch.testing.assert_close(after, expected(2))

    def test_frozen_parameter_made_trainable(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            net = Net()
            net.left.bias.requires_grad_(False)
            ddp = DDP(net)
            ddp.module.left.bias.requires_grad_(True)
            error = error_of(lambda: good_step(ddp))
            return error, good_step(DDP(Net()))

        for error, after in run_ranks(2, run):
            assert isinstance(error, ParametersChangedError)
            assert mentions(error, "left.bias")
            torch.testing.assert_close(after, expected(2))

    @pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
    def test_converted_after_construction(self, where: str) -> None:
        def convert(ddp: DDP, dtype: torch.dtype) -> Exception | None:
            good_step(ddp)
            ddp.zero_grad()
            x = batch(dist.get_rank())
            if where == "everywhere" or dist.get_rank() == 1:
                ddp.module.to(dtype)
                x = x.to(dtype)
            return error_of(lambda: ddp(x).sum().backward())

        def run() -> list[tuple[Exception | None, Gradients]]:
            results = []
            for dtype in (torch.float16, torch.float64):
                error = convert(DDP(Net()), dtype)
                results.append((error, good_step(DDP(Net()))))
            return results

        for results in run_ranks(2, run):
            for dtype, (error, after) in zip(("float16", "float64"), results, strict=True):
                assert isinstance(error, GradientMismatchError)
                assert mentions(error, "trunk.weight", "torch.float32", f"torch.{dtype}")
                assert mentions(error, "rank 1", "before it is wrapped")
                torch.testing.assert_close(after, expected(2))

    def test_converted_and_back_again(self) -> None:
        """Who undoes the conversion has the module that was wrapped, and can go on."""

        def run() -> tuple[Exception | None, Gradients | Exception]:
            ddp = DDP(Net())
            good_step(ddp)
            ddp.zero_grad()
            ddp.module.double()
            error = error_of(lambda: ddp(batch(0).double()).sum().backward())
            ddp.zero_grad()
            ddp.module.float()
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, GradientMismatchError)
            torch.testing.assert_close(after, expected(2))
