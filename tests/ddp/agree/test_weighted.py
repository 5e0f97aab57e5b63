"""``ddp.weighted(n)``: the exact mean over all samples, whatever the ranks' shares."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import NonFiniteGradientError
from paceline.testing import run_ranks
from tests.ddp.agree.weighted_cases import (
    UNEQUAL,
    Gradients,
    Net,
    assert_all_close,
    gradients,
    make_batch,
    mean_loss,
    plain_step,
    reference,
    weighted_step,
)


def run_weighted(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> list[Gradients]:
    def run() -> Gradients:
        ddp = DDP(Net(dtype), **options)
        weighted_step(ddp, sizes, dtype)
        return gradients(ddp)

    return run_ranks(len(sizes), run)


class TestMean:
    def test_is_that_of_all_samples(self) -> None:
        assert_all_close(run_weighted(UNEQUAL), reference(UNEQUAL))

    def test_differs_from_the_mean_of_means(self) -> None:
        def run() -> Gradients:
            ddp = DDP(Net())
            x, y = make_batch(dist.get_rank(), UNEQUAL[dist.get_rank()])
            mean_loss(ddp(x), y).backward()
            return gradients(ddp)

        plain = run_ranks(3, run)[0]["first"]
        assert not torch.allclose(plain, reference(UNEQUAL)["first"], rtol=1e-2)

    def test_in_every_dtype_with_and_without_views(self) -> None:
        exact = (torch.float32, torch.float64, torch.complex64, torch.complex128)
        coarse = (torch.bfloat16, torch.float16)

        def run() -> dict[tuple[torch.dtype, bool | None], Gradients]:
            found = {}
            for dtype in (*exact, *coarse):
                for views in (None, True, False):
                    ddp = DDP(Net(dtype), gradient_as_bucket_view=views)
                    weighted_step(ddp, UNEQUAL, dtype)
                    found[dtype, views] = gradients(ddp)
            return found

        for per_dtype in run_ranks(3, run):
            for (dtype, _), found in per_dtype.items():
                tolerance = {"rtol": 5e-2, "atol": 2e-2} if dtype in coarse else {}
                assert_all_close([found], reference(UNEQUAL, dtype), **tolerance)

    def test_in_many_buckets_and_after_they_are_rebuilt(self) -> None:
        def run() -> list[Gradients]:
            ddp = DDP(Net(), bucket_cap_mb=1e-6)
            found = []
            for _ in range(3):
                ddp.zero_grad()
                weighted_step(ddp, UNEQUAL)
                found.append(gradients(ddp))
            assert len(ddp.stats().buckets) == 3
            return found

        for steps in run_ranks(3, run):
            assert_all_close(steps, reference(UNEQUAL))

    def test_with_weights_that_are_not_whole(self) -> None:
        weights = (0.25, 1.5)

        def run() -> Gradients:
            rank = dist.get_rank()
            ddp = DDP(Net())
            x, y = make_batch(rank, 4)
            with ddp.weighted(weights[rank]):
                mean_loss(ddp(x), y).backward()
            return gradients(ddp)

        local = []
        for rank in range(2):
            net = Net()
            x, y = make_batch(rank, 4)
            mean_loss(net(x), y).backward()
            local.append(gradients(net))
        expected = {
            name: (weights[0] * local[0][name] + weights[1] * local[1][name]) / sum(weights)
            for name in local[0]
        }
        assert_all_close(run_ranks(2, run), expected)

    def test_of_gradients_larger_than_a_batched_copy(self) -> None:
        """Gradients above 128 KiB go another way into the bucket."""

        def run() -> torch.Tensor:
            rank = dist.get_rank()
            ddp = DDP(nn.Linear(256, 256, bias=False))
            with ddp.weighted(1 + 2 * rank):
                (ddp(torch.full((1, 256), 1.0 + rank)).sum()).backward()
            return ddp.module.weight.grad

        for found in run_ranks(2, run):
            torch.testing.assert_close(found, torch.full((256, 256), (1 * 1.0 + 3 * 2.0) / 4))


class TestNothing:
    """A rank without samples, or all of them."""

    def test_nan_gradients_without_weight_do_no_harm(self) -> None:
        def step(nonfinite: str) -> tuple[bool, Gradients, int]:
            rank = dist.get_rank()
            ddp = DDP(Net(), nonfinite=nonfinite)
            seen: list[torch.Tensor] = []
            ddp.module.first.register_hook(seen.append)
            x, y = make_batch(0, 3)
            with ddp.weighted(0 if rank else 3):
                mean_loss(ddp(x / 0 if rank else x), y).backward()
            return bool(seen[0].isnan().all()), gradients(ddp), ddp.skipped_steps

        def run() -> list[tuple[bool, Gradients, int]]:
            return [step(nonfinite) for nonfinite in ("ignore", "raise", "skip")]

        for rank, results in enumerate(run_ranks(2, run)):
            for was_nan, found, skipped in results:
                assert was_nan == (rank == 1)
                assert skipped == 0
                torch.testing.assert_close(found, reference((3,)))

    def test_empty_batch(self) -> None:
        assert_all_close(run_weighted((3, 0)), reference((3,)))

    def test_large_nan_gradient_without_weight(self) -> None:
        def run() -> torch.Tensor:
            rank = dist.get_rank()
            ddp = DDP(nn.Linear(256, 256, bias=False))
            x = torch.full((1, 256), float("nan") if rank else 1.0)
            with ddp.weighted(1 - rank):
                ddp(x).sum().backward()
            return ddp.module.weight.grad

        for found in run_ranks(2, run):
            torch.testing.assert_close(found, torch.ones(256, 256))

    def test_no_samples_anywhere(self) -> None:
        for found in run_weighted((0, 0)):
            assert sorted(found) == ["first", "second", "spare"]
            assert all((gradient == 0).all() for gradient in found.values())

    def test_no_samples_anywhere_but_nan_gradients(self) -> None:
        def run() -> list[Gradients]:
            found = []
            for views in (None, False):
                ddp = DDP(Net(), gradient_as_bucket_view=views)
                with ddp.weighted(0):
                    (ddp(torch.ones(1, 4)).sum() * float("nan")).backward()
                found.append(gradients(ddp))
            return found

        for per_views in run_ranks(2, run):
            for found in per_views:
                assert sorted(found) == ["first", "second", "spare"]
                assert all((gradient == 0).all() for gradient in found.values())

    def test_next_step_has_samples_again(self) -> None:
        def run() -> Gradients:
            ddp = DDP(Net())
            weighted_step(ddp, (0, 0))
            ddp.zero_grad()
            weighted_step(ddp, (4, 2))
            return gradients(ddp)

        assert_all_close(run_ranks(2, run), reference((4, 2)))

    def test_nan_behind_samples_does_count(self) -> None:
        def run() -> NonFiniteGradientError:
            ddp = DDP(Net(), nonfinite="raise")
            ddp.module.second.register_hook(lambda g: g / 0 if dist.get_rank() else g)
            with pytest.raises(NonFiniteGradientError) as raised:
                weighted_step(ddp, (3, 2))
            return raised.value

        for error in run_ranks(2, run):
            assert (error.rank, error.parameters) == (1, ("second",))


class TestManyTokens:
    """In float16 a million tokens times a gradient overflow, until their scale is known."""

    @staticmethod
    def run(weights: tuple[tuple[float, float], ...]) -> list[list[tuple[Gradients, bool]]]:
        """Run one weighted step for each pair; return gradients, and whether it warned."""

        def run() -> list[tuple[Gradients, bool]]:
            rank = dist.get_rank()
            ddp = DDP(Net(torch.float16))
            x, y = make_batch(rank, 4, torch.float16)
            found = []
            for step in weights:
                ddp.zero_grad()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    with ddp.weighted(step[rank]):
                        mean_loss(ddp(x), y).backward()
                told = any("only their ratios matter" in str(w.message) for w in caught)
                found.append((gradients(ddp), told))
            return found

        return run_ranks(2, run)

    def test_in_float16_once_the_scale_is_known(self) -> None:
        weights = ((10**6, 3 * 10**6), (10**6, 10**6), (2 * 10**6, 10**6), (10**6, 0))
        for steps in self.run(weights):
            first, told = steps[0]
            assert told
            assert not all(torch.isfinite(g).all() for g in first.values())
            for step, (got, told) in zip(weights[1:], steps[1:], strict=True):
                assert not told
                want = _mean_of_ranks(step, torch.float16)
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)

    def test_in_units_of_a_thousand_nothing_overflows(self) -> None:
        weights = ((1.0, 3.0), (30.0, 10.0), (3.0, 1.0))
        for steps in self.run(weights):
            for step, (got, told) in zip(weights, steps, strict=True):
                assert not told
                want = _mean_of_ranks(step, torch.float16)
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)

    def test_millions_of_tokens_in_float32_from_the_first_step(self) -> None:
        def run() -> Gradients:
            rank = dist.get_rank()
            ddp = DDP(Net())
            x, y = make_batch(rank, 4)
            with ddp.weighted((10**6, 3 * 10**9)[rank]):
                mean_loss(ddp(x), y).backward()
            return gradients(ddp)

        for found in run_ranks(2, run):
            torch.testing.assert_close(found, _mean_of_ranks((10**6, 3 * 10**9), torch.float32))


def _mean_of_ranks(weights: tuple[float, ...], dtype: torch.dtype) -> Gradients:
    """The weighted mean of what each rank computes alone on 4 samples, in float64."""
    total: Gradients = {}
    for rank, weight in enumerate(weights):
        net = Net(dtype)
        x, y = make_batch(rank, 4, dtype)
        mean_loss(net(x), y).backward()
        for name, gradient in gradients(net).items():
            share = gradient.double() * weight / sum(weights)
            total[name] = total.get(name, torch.zeros_like(share)) + share
    return {name: value.to(dtype) for name, value in total.items()}


class TestCost:
    def test_no_collective_more_than_without(self) -> None:
        def count(step: Any, ddp: DDP) -> Counter[str]:
            with torch.profiler.profile() as profile:
                step(ddp, (5, 2))
            return Counter(e.name for e in profile.events() if e.name.startswith("gloo:"))

        def run() -> tuple[Counter[str], Counter[str], int]:
            ddp = DDP(Net(), bucket_cap_mb=1e-6, transport="c10d")
            for _ in range(3):  # the second step rebuilds the buckets
                plain_step(ddp, (5, 2))
            plain, weighted = count(plain_step, ddp), count(weighted_step, ddp)
            return plain, weighted, len(ddp.stats().buckets)

        for plain, weighted, buckets in run_ranks(2, run):
            assert plain == weighted == {"gloo:all_reduce": buckets}
            assert buckets == 3
