"""``ddp.weighted(n)``: the exact mean over all samples, whatever the ranks' shares."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError, DesynchronizedError, NonFiniteGradientError
from paceline.testing import run_ranks

Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two matrices of any dtype, complex too, and one that a forward may leave out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Parameter(torch.randn(4, 8, generator=generator).to(dtype))
        self.second = nn.Parameter(torch.randn(8, 3, generator=generator).to(dtype))
        self.spare = nn.Parameter(torch.randn(8, 3, generator=generator).to(dtype))

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = (x @ self.first).tanh()
        out = hidden @ self.second
        return out + hidden @ self.spare if spare else out


def make_batch(
    rank: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(size, 4, generator=generator).to(dtype)
    return x, torch.randn(size, 3, generator=generator).to(dtype)


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over samples; NaN for an empty batch, like every mean loss of torch."""
    return (output - target).abs().square().mean()


def gradients(module: nn.Module) -> Gradients:
    module = module.module if isinstance(module, DDP) else module
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def reference(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Gradients:
    """One process that trains on all samples."""
    batches = [make_batch(rank, size, dtype) for rank, size in enumerate(sizes)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    net = Net(dtype)
    mean_loss(net(x), y).backward()
    return gradients(net)


def weighted_step(ddp: DDP, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    size = sizes[dist.get_rank()]
    x, y = make_batch(dist.get_rank(), size, dtype)
    with ddp.weighted(size):
        mean_loss(ddp(x), y).backward()


def plain_step(ddp: DDP, sizes: tuple[int, ...]) -> None:
    x, y = make_batch(dist.get_rank(), sizes[dist.get_rank()])
    mean_loss(ddp(x), y).backward()


def run_weighted(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> list[Gradients]:
    def run() -> Gradients:
        ddp = DDP(Net(dtype), **options)
        weighted_step(ddp, sizes, dtype)
        return gradients(ddp)

    return run_ranks(len(sizes), run)


def assert_all_close(
    per_rank: list[Gradients], expected: Gradients, **tolerance: float | None
) -> None:
    for found in per_rank:
        torch.testing.assert_close(found, expected, **tolerance)


UNEQUAL = (5, 2, 9)


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


class TestTogetherWith:
    def test_no_sync(self) -> None:
        """Accumulated gradients carry the weight of the backward that reduces them."""
        weights = (3, 1)

        def run() -> Gradients:
            rank = dist.get_rank()
            ddp = DDP(Net())
            with ddp.weighted(weights[rank]):
                with ddp.no_sync():
                    mean_loss(ddp(make_batch(rank, 4)[0]), torch.zeros(4, 3)).backward()
                mean_loss(ddp(make_batch(rank, 4)[0]), torch.ones(4, 3)).backward()
            return gradients(ddp)

        expected: Gradients = {}
        for rank, weight in enumerate(weights):
            net = Net()
            mean_loss(net(make_batch(rank, 4)[0]), torch.zeros(4, 3)).backward()
            mean_loss(net(make_batch(rank, 4)[0]), torch.ones(4, 3)).backward()
            for name, gradient in gradients(net).items():
                expected[name] = expected.get(name, 0) + gradient * weight / sum(weights)
        assert_all_close(run_ranks(2, run), expected)

    def test_gradients_of_an_earlier_step(self) -> None:
        def run() -> Gradients:
            ddp = DDP(Net())
            weighted_step(ddp, (4, 2))
            weighted_step(ddp, (4, 2))
            return gradients(ddp)

        expected = {name: 2 * g for name, g in reference((4, 2)).items()}
        assert_all_close(run_ranks(2, run), expected)

    def test_unused_parameters(self) -> None:
        """`spare` is used on rank 0 only; then nowhere, and keeps its gradient."""
        weights = (3, 1)

        def step(ddp: DDP, *, spare: bool) -> None:
            rank = dist.get_rank()
            x, y = make_batch(rank, 4)
            with ddp.weighted(weights[rank]):
                mean_loss(ddp(x, spare=spare), y).backward()

        def run() -> tuple[Gradients, Gradients]:
            ddp = DDP(Net(), find_unused_parameters=True)
            step(ddp, spare=dist.get_rank() == 0)
            before = gradients(ddp)
            for name in ("first", "second"):
                getattr(ddp.module, name).grad = None
            step(ddp, spare=False)
            return before, gradients(ddp)

        net = Net()
        x, y = make_batch(0, 4)
        mean_loss(net(x), y).backward()
        expected = net.spare.grad * weights[0] / sum(weights)
        for before, after in run_ranks(2, run):
            torch.testing.assert_close(before["spare"], expected)
            assert torch.equal(after["spare"], before["spare"])
            assert not torch.equal(after["first"], before["first"])

    def test_static_graph(self) -> None:
        def run() -> list[Gradients]:
            ddp = DDP(Net(), static_graph=True)
            found = []
            for _ in range(3):
                ddp.zero_grad()
                weighted_step(ddp, UNEQUAL)
                found.append(gradients(ddp))
            return found

        for steps in run_ranks(3, run):
            assert_all_close(steps, reference(UNEQUAL))

    def test_communication_hook(self) -> None:
        def run() -> list[Gradients]:
            ddp = DDP(Net(), bucket_cap_mb=1e-6)
            ddp.register_comm_hook(None, allreduce_hook)
            found = []
            for _ in range(2):
                ddp.zero_grad()
                weighted_step(ddp, (5, 2))
                found.append(gradients(ddp))
            return found

        for steps in run_ranks(2, run):
            assert_all_close(steps, reference((5, 2)))

    def test_sparse_gradients(self) -> None:
        rows = ((1, 1, 5), (1, 7))

        def build() -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))

        def run() -> Gradients:
            ddp = DDP(build())
            mine = torch.tensor(rows[dist.get_rank()])
            with ddp.weighted(len(mine)):
                ddp(mine).square().mean().backward()
            return {name: g.to_dense() for name, g in gradients(ddp).items()}

        net = build()
        net(torch.tensor([*rows[0], *rows[1]])).square().mean().backward()
        expected = {name: g.to_dense() for name, g in gradients(net).items()}
        assert_all_close(run_ranks(2, run), expected)

    def test_sparse_gradients_without_weight(self) -> None:
        def run() -> torch.Tensor:
            ddp = DDP(nn.Embedding(4, 2, sparse=True))
            scale = float("nan") if dist.get_rank() else 2.0
            with ddp.weighted(1 - dist.get_rank()):
                (ddp(torch.tensor([1])).sum() * scale).backward()
            return ddp.module.weight.grad.to_dense()

        expected = torch.zeros(4, 2)
        expected[1] = 2.0
        for found in run_ranks(2, run):
            assert torch.equal(found, expected)

    def test_join(self) -> None:
        """Rank 0 has one batch more. Afterwards both train on together."""
        sizes = ((5, 2), (200, 0))

        def run() -> tuple[list[Gradients], Gradients]:
            ddp = DDP(Net())
            found = []
            with ddp.join():
                for step in sizes[: 2 - dist.get_rank()]:
                    ddp.zero_grad()
                    weighted_step(ddp, step)
                    found.append(gradients(ddp))
            ddp.zero_grad()
            weighted_step(ddp, (5, 2))
            return found, gradients(ddp)

        (two, after_0), (one, after_1) = run_ranks(2, run)
        assert_all_close([two[0], one[0]], reference((5, 2)))
        assert_all_close([two[1]], reference((200,)))
        assert_all_close([after_0, after_1], reference((5, 2)))


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


def _error_of(ddp: DDP, n: Any) -> BaseException | None:
    try:
        with ddp.weighted(n):
            return None
    except Exception as error:
        return error


class TestMistakes:
    def test_one_rank_without_weight(self) -> None:
        def run() -> tuple[DesynchronizedError, Gradients]:
            ddp = DDP(Net())
            step = weighted_step if dist.get_rank() == 0 else plain_step
            with pytest.raises(DesynchronizedError) as raised:
                step(ddp, (5, 2))
            ddp.zero_grad()
            weighted_step(ddp, (5, 2))
            return raised.value, gradients(ddp)

        for error, found in run_ranks(2, run):
            assert error.rank == 1
            assert "[0]" in str(error)
            assert "[1]" in str(error)
            assert "with ddp.weighted(n)" in str(error)
            torch.testing.assert_close(found, reference((5, 2)))

    def test_weight_that_is_none(self) -> None:
        wrong = (-1, float("nan"), float("inf"), "many", "5", None)

        def run() -> tuple[list[BaseException | None], Gradients]:
            ddp = DDP(Net())
            found = [_error_of(ddp, n) for n in wrong]
            x, y = make_batch(0, 4)
            mean_loss(ddp(x), y).backward()
            return found, gradients(ddp)

        ((found, after),) = run_ranks(1, run)
        torch.testing.assert_close(after, reference((4,)))
        for n, error in zip(wrong, found, strict=True):
            assert isinstance(error, ConfigurationError), n
            assert "weighted(" in str(error)
            assert str(n) in str(error)
            assert "not negative" in str(error)

    def test_exception_inside_restores_the_plain_mean(self) -> None:
        def run() -> Gradients:
            rank = dist.get_rank()
            ddp = DDP(Net())
            with pytest.raises(KeyError), ddp.weighted(1 + rank):
                raise KeyError
            x, y = make_batch(rank, 4)
            mean_loss(ddp(x), y).backward()
            return gradients(ddp)

        assert_all_close(run_ranks(2, run), reference((4, 4)))

    def test_inner_weight_holds_inside_only(self) -> None:
        def run() -> list[Gradients]:
            ddp = DDP(Net())
            found = []
            with ddp.weighted((5, 2)[dist.get_rank()]):
                weighted_step(ddp, (2, 5))
                found.append(gradients(ddp))
                ddp.zero_grad()
                x, y = make_batch(dist.get_rank(), (5, 2)[dist.get_rank()])
                mean_loss(ddp(x), y).backward()
                found.append(gradients(ddp))
            return found

        for inner, outer in run_ranks(2, run):
            torch.testing.assert_close(inner, reference((2, 5)))
            torch.testing.assert_close(outer, reference((5, 2)))
