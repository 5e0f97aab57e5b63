"""``nonfinite="ignore" | "raise" | "skip"``: what becomes of NaN and infinity, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError, NonFiniteGradientError
from paceline.testing import run_ranks

NAN, INFINITY = float("nan"), float("inf")
Gradients = dict[str, torch.Tensor]


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 2, bias=False, dtype=dtype)
    )


def poison(ddp: DDP, name: str, value: float, rank: int = 1) -> Any:
    """Put `value` into one element of a parameter's gradient, on one rank."""

    def put(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    parameter = ddp.module.get_parameter(name)
    return parameter.register_hook(put) if dist.get_rank() == rank else None


def step(ddp: DDP, scale: float = 1.0) -> None:
    dtype = next(ddp.parameters()).dtype
    x = torch.full((2, 4), 0.1 * (1 + dist.get_rank()), dtype=dtype)
    (ddp(x).abs().square().sum() * scale).backward()


def cure(handle: Any, ddp: DDP) -> None:
    if handle is not None:
        handle.remove()
    ddp.zero_grad()


def gradients(ddp: DDP) -> Gradients:
    return {name: p.grad.to_dense().clone() for name, p in ddp.module.named_parameters()}


def expected_gradients(ranks: int = 2, dtype: torch.dtype = torch.float32) -> Gradients:
    """What one process gets: the mean over the ranks' losses."""
    net = build(dtype)
    for rank in range(ranks):
        x = torch.full((2, 4), 0.1 * (1 + rank), dtype=dtype)
        (net(x).abs().square().sum() / ranks).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def is_zero(found: Gradients) -> bool:
    return all(bool((gradient == 0).all()) for gradient in found.values())


class TestIgnore:
    def test_is_the_default_and_lets_nan_through_to_all(self) -> None:
        def run() -> tuple[Gradients, int]:
            ddp = DDP(build())
            poison(ddp, "2.weight", NAN)
            step(ddp)
            return gradients(ddp), ddp.skipped_steps

        for found, skipped in run_ranks(2, run):
            assert found["2.weight"].view(-1)[0].isnan()
            torch.testing.assert_close(found["0.weight"], expected_gradients()["0.weight"])
            assert skipped == 0


class TestRaise:
    def test_names_rank_and_parameter_on_every_rank(self) -> None:
        def run() -> tuple[list[NonFiniteGradientError], Gradients]:
            errors = []
            for name, value, bucket_mb in (
                ("0.bias", NAN, None),
                ("2.weight", INFINITY, 1e-6),
                ("0.weight", -INFINITY, 1e-6),
            ):
                ddp = DDP(build(), nonfinite="raise", bucket_cap_mb=bucket_mb)
                handle = poison(ddp, name, value)
                with pytest.raises(NonFiniteGradientError) as raised:
                    step(ddp)
                errors.append(raised.value)
                cure(handle, ddp)
                step(ddp)
            return errors, gradients(ddp)

        for errors, after in run_ranks(3, run):
            for name, error in zip(("0.bias", "2.weight", "0.weight"), errors, strict=True):
                assert isinstance(error, ArithmeticError)
                assert (error.rank, error.parameters) == (1, (name,))
                assert f"rank 1: {name}" in str(error)
                assert 'nonfinite="skip"' in str(error)
            torch.testing.assert_close(after, expected_gradients(3))

    def test_names_all_ranks_and_all_parameters_of_a_bucket(self) -> None:
        def run() -> NonFiniteGradientError:
            ddp = DDP(build(), nonfinite="raise")
            poison(ddp, "0.weight", NAN, rank=0)
            poison(ddp, "0.bias", NAN, rank=2)
            poison(ddp, "2.weight", NAN, rank=2)
            with pytest.raises(NonFiniteGradientError) as raised:
                step(ddp)
            return raised.value

        for error in run_ranks(3, run):
            lines = [line for line in str(error).splitlines() if line.startswith("  rank")]
            assert len(lines) == 2
            assert lines[0].startswith("  rank 0: 0.weight")
            assert lines[1].startswith("  rank 2: ")
            assert "0.bias" in lines[1]
            assert "2.weight" in lines[1]
            assert (error.rank, error.parameters) == (0, ("0.weight",))

    def test_good_steps_are_untouched(self) -> None:
        def run() -> Gradients:
            ddp = DDP(build(), nonfinite="raise")
            step(ddp)
            return gradients(ddp)

        for found in run_ranks(2, run):
            torch.testing.assert_close(found, expected_gradients())

    def test_complex(self) -> None:
        def run() -> tuple[NonFiniteGradientError, Gradients]:
            ddp = DDP(build(torch.complex64), nonfinite="raise")
            handle = poison(ddp, "2.weight", complex(0.0, NAN))
            with pytest.raises(NonFiniteGradientError) as raised:
                step(ddp)
            cure(handle, ddp)
            step(ddp)
            return raised.value, gradients(ddp)

        for error, after in run_ranks(2, run):
            assert (error.rank, error.parameters) == (1, ("2.weight",))
            torch.testing.assert_close(after, expected_gradients(dtype=torch.complex64))

    def test_sparse(self) -> None:
        def run() -> tuple[NonFiniteGradientError, torch.Tensor]:
            ddp = DDP(nn.Embedding(4, 2, sparse=True), nonfinite="raise")
            scale = NAN if dist.get_rank() == 0 else 1.0
            with pytest.raises(NonFiniteGradientError) as raised:
                (ddp(torch.tensor([1, 2])).sum() * scale).backward()
            ddp.zero_grad()
            ddp(torch.tensor([1, 1])).sum().backward()
            return raised.value, ddp.module.weight.grad.to_dense()

        for error, after in run_ranks(2, run):
            assert (error.rank, error.parameters) == (0, ("weight",))
            assert after[:, 0].tolist() == [0, 2, 0, 0]

    def test_with_a_communication_hook(self) -> None:
        def run() -> tuple[NonFiniteGradientError, Gradients]:
            ddp = DDP(build(), nonfinite="raise")
            ddp.register_comm_hook(None, allreduce_hook)
            handle = poison(ddp, "0.weight", NAN)
            with pytest.raises(NonFiniteGradientError) as raised:
                step(ddp)
            cure(handle, ddp)
            step(ddp)
            return raised.value, gradients(ddp)

        for error, after in run_ranks(2, run):
            assert (error.rank, error.parameters) == (1, ("0.weight",))
            torch.testing.assert_close(after, expected_gradients())

    def test_accumulated_nan_is_seen_by_the_step_that_reduces_it(self) -> None:
        def run() -> NonFiniteGradientError:
            ddp = DDP(build(), nonfinite="raise")
            handle = poison(ddp, "0.weight", NAN)
            with ddp.no_sync():
                step(ddp)
            if handle is not None:
                handle.remove()
            with pytest.raises(NonFiniteGradientError) as raised:
                step(ddp)
            return raised.value

        for error in run_ranks(2, run):
            assert (error.rank, error.parameters) == (1, ("0.weight",))


class TestSkip:
    @staticmethod
    def two_steps(
        options: dict[str, Any], prepare: Callable[[DDP], None] = lambda ddp: None
    ) -> list[tuple[Gradients, int, int, Gradients, int]]:
        def run() -> tuple[Gradients, int, int, Gradients, int]:
            ddp = DDP(build(), nonfinite="skip", **options)
            prepare(ddp)
            handle = poison(ddp, "0.weight", NAN)
            step(ddp)
            bad, counted, in_stats = gradients(ddp), ddp.skipped_steps, ddp.stats().skipped_steps
            cure(handle, ddp)
            step(ddp)
            return bad, counted, in_stats, gradients(ddp), ddp.skipped_steps

        return run_ranks(2, run)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"gradient_as_bucket_view": False, "bucket_cap_mb": 1e-6},
            {"static_graph": True},
            {"find_unused_parameters": True},
        ],
        ids=str,
    )
    def test_zeroes_all_gradients_on_every_rank(self, options: dict[str, Any]) -> None:
        for bad, counted, in_stats, good, counted_after in self.two_steps(options):
            assert sorted(bad) == ["0.bias", "0.weight", "2.weight"]
            assert is_zero(bad)
            assert counted == in_stats == counted_after == 1
            torch.testing.assert_close(good, expected_gradients())

    def test_with_a_communication_hook(self) -> None:
        def prepare(ddp: DDP) -> None:
            ddp.register_comm_hook(None, allreduce_hook)

        for bad, counted, _, good, counted_after in self.two_steps({}, prepare):
            assert is_zero(bad)
            assert counted == counted_after == 1
            torch.testing.assert_close(good, expected_gradients())

    def test_weights_stay_where_they_were(self) -> None:
        def run() -> bool:
            ddp = DDP(build(), nonfinite="skip")
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            before = [p.detach().clone() for p in ddp.parameters()]
            poison(ddp, "2.weight", INFINITY, rank=0)
            step(ddp)
            optimizer.step()
            return all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))

        assert run_ranks(2, run) == [True, True]

    def test_counts_every_step(self) -> None:
        def run() -> tuple[int, int]:
            ddp = DDP(build(), nonfinite="skip")
            poison(ddp, "0.weight", NAN)
            for _ in range(3):
                ddp.zero_grad()
                step(ddp)
            return ddp.skipped_steps, ddp.stats().steps

        assert run_ranks(2, run) == [(3, 3), (3, 3)]

    @pytest.mark.parametrize("value", [NAN, INFINITY])
    def test_sparse(self, value: float) -> None:
        def embed(ddp: DDP, scale: float) -> torch.Tensor:
            ddp.zero_grad()
            (ddp(torch.tensor([1, 1 + dist.get_rank()])).sum() * scale).backward()
            return ddp.module.weight.grad.to_dense()

        def run() -> tuple[torch.Tensor, torch.Tensor, int]:
            ddp = DDP(nn.Embedding(4, 2, sparse=True), nonfinite="skip")
            bad = embed(ddp, value if dist.get_rank() == 1 else 1.0)
            return bad, embed(ddp, 1.0), ddp.skipped_steps

        expected = torch.tensor([[0.0, 0], [1.5, 1.5], [0.5, 0.5], [0, 0]])
        for bad, good, skipped in run_ranks(2, run):
            assert skipped == 1
            assert torch.equal(good, expected)
            assert torch.equal(bad, torch.zeros(4, 2))


class TestOverflow:
    """Every rank's gradient is finite in float16; is the mean?"""

    def test_mean_of_large_gradients_is_finite(self) -> None:
        def run() -> torch.Tensor:
            ddp = DDP(nn.Linear(2, 1, bias=False, dtype=torch.float16), nonfinite="raise")
            (ddp(torch.ones(1, 2, dtype=torch.float16)) * 60000).sum().backward()
            return ddp.module.weight.grad

        for found in run_ranks(3, run):
            assert found.isfinite().all()
            torch.testing.assert_close(found, torch.full_like(found, 60000))

    @pytest.mark.parametrize("nonfinite", ["raise", "skip"])
    def test_sum_that_overflows_in_a_hook(self, nonfinite: str) -> None:
        """A hook that sums first and divides then makes infinity out of finite gradients."""

        def sum_then_divide(_, bucket):  # type: ignore[no-untyped-def]
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / dist.get_world_size())

        def run() -> tuple[Exception | None, torch.Tensor, int]:
            ddp = DDP(nn.Linear(2, 1, bias=False, dtype=torch.float16), nonfinite=nonfinite)
            ddp.register_comm_hook(None, sum_then_divide)
            error = None
            try:
                (ddp(torch.ones(1, 2, dtype=torch.float16)) * 60000).sum().backward()
            except NonFiniteGradientError as caught:
                error = caught
            return error, ddp.module.weight.grad, ddp.skipped_steps

        for error, found, skipped in run_ranks(2, run):
            if nonfinite == "raise":
                assert error is not None
                assert "weight" in error.parameters
            else:
                assert skipped == 1
                assert (found == 0).all()


def test_unknown_value_is_refused() -> None:
    def run() -> list[ConfigurationError]:
        errors = []
        for value in ("warn", None, True):
            with pytest.raises(ConfigurationError) as raised:
                DDP(build(), nonfinite=value)
            errors.append(raised.value)
        return errors

    (errors,) = run_ranks(1, run)
    for value, error in zip(("warn", None, True), errors, strict=True):
        assert f"nonfinite={value!r}" in str(error)
        for choice in ("ignore", "raise", "skip"):
            assert repr(choice) in str(error)
