"""``ddp.stats()``: an immutable account of the latest step."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import BucketStats, DDPStats
from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks

LAYERS = 3
LAYER_BYTES = 8 * 8 * 4


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))


def wrap(**options: Any) -> DDP:
    """One bucket per layer."""
    return DDP(build(), bucket_cap_mb=1e-6, **options)


def step(ddp: DDP) -> None:
    ddp(torch.ones(2, 8)).sum().backward()


def burn(seconds: float) -> None:
    """Compute for a while: what makes a rank slow in real life."""
    until_s = time.perf_counter() + seconds
    x = torch.ones(16, 16)
    while time.perf_counter() < until_s:
        x = x @ x / 16


class TestSnapshot:
    def test_before_the_first_step(self) -> None:
        (stats,) = run_ranks(1, lambda: wrap().stats())
        assert (stats.steps, stats.skipped_steps, stats.reduced_bytes) == (0, 0, 0)
        assert stats.backward_ms == stats.exposed_ms == 0.0
        assert all(bucket.last_rank == -1 for bucket in stats.buckets)
        assert sum(bucket.bytes for bucket in stats.buckets) == LAYERS * LAYER_BYTES

    def test_cannot_be_changed(self) -> None:
        def run() -> DDPStats:
            ddp = wrap()
            step(ddp)
            return ddp.stats()

        (stats,) = run_ranks(1, run)
        assert isinstance(stats, DDPStats)
        assert isinstance(stats.buckets, tuple)
        for holder in (stats, stats.buckets[0]):
            for field in dataclasses.fields(holder):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(holder, field.name, 1)
        assert isinstance(stats.buckets[0], BucketStats)
        assert isinstance(stats.buckets[0].parameters, tuple)
        hash(stats)  # a list somewhere inside would raise

    def test_does_not_change_with_further_steps(self) -> None:
        def run() -> tuple[DDPStats, DDPStats, DDPStats]:
            ddp = wrap()
            step(ddp)
            first = ddp.stats()
            copy = dataclasses.replace(
                first, buckets=tuple(map(dataclasses.replace, first.buckets))
            )
            step(ddp)
            step(ddp)
            return first, copy, ddp.stats()

        for first, copy, later in run_ranks(2, run):
            assert first == copy
            assert later != first
            assert (first.steps, later.steps) == (1, 3)


class TestCounters:
    def test_steps_and_bytes(self) -> None:
        def run() -> list[DDPStats]:
            ddp = wrap()
            found = []
            for _ in range(3):
                step(ddp)
                found.append(ddp.stats())
            with ddp.no_sync():
                step(ddp)
            found.append(ddp.stats())
            return found

        for found in run_ranks(2, run):
            assert [stats.steps for stats in found] == [1, 2, 3, 3]
            assert [stats.reduced_bytes for stats in found] == [
                LAYERS * LAYER_BYTES * steps for steps in (1, 2, 3, 3)
            ]

    def test_buckets_have_their_bytes_and_names_in_order_of_arrival(self) -> None:
        def run() -> DDPStats:
            ddp = wrap()
            step(ddp)
            step(ddp)
            return ddp.stats()

        for stats in run_ranks(2, run):
            assert [bucket.index for bucket in stats.buckets] == [0, 1, 2]
            assert [bucket.bytes for bucket in stats.buckets] == [LAYER_BYTES] * 3
            names = [bucket.parameters for bucket in stats.buckets]
            assert names == [("2.weight",), ("1.weight",), ("0.weight",)]

    def test_bytes_are_those_of_the_gradients_dtype(self) -> None:
        def run() -> int:
            ddp = DDP(build().to(torch.bfloat16))
            ddp(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
            return ddp.stats().reduced_bytes

        assert run_ranks(1, run) == [LAYERS * LAYER_BYTES // 2]

    def test_names_the_transport(self) -> None:
        assert run_ranks(1, lambda: wrap().stats().transport) == ["c10d:gloo"]

    def test_bytes_of_a_failed_step_do_not_count(self) -> None:
        def run() -> tuple[int, int]:
            ddp = wrap(nonfinite="raise")
            with pytest.raises(ArithmeticError):
                (ddp(torch.ones(2, 8)).sum() * float("nan")).backward()
            ddp.zero_grad()
            step(ddp)
            stats = ddp.stats()
            return stats.reduced_bytes, stats.skipped_steps

        assert run_ranks(2, run) == [(LAYERS * LAYER_BYTES, 0)] * 2


class TestTimes:
    @staticmethod
    def after_three_steps(**options: Any) -> list[DDPStats]:
        def run() -> DDPStats:
            ddp = wrap(**options)
            for _ in range(3):
                step(ddp)
            return ddp.stats()

        return run_ranks(2, run)

    @pytest.mark.parametrize(
        "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
    )
    def test_are_in_the_order_of_events(self, options: dict[str, Any]) -> None:
        for stats in self.after_three_steps(**options):
            for bucket in stats.buckets:
                assert 0 < bucket.ready_ms <= bucket.began_ms <= bucket.ended_ms
            began = [bucket.began_ms for bucket in stats.buckets]
            assert began == sorted(began)
            assert began[0] <= stats.backward_ms

    def test_exposed_is_what_backward_did_not_hide(self) -> None:
        for stats in self.after_three_steps():
            last = max(bucket.ended_ms for bucket in stats.buckets)
            assert stats.exposed_ms == pytest.approx(max(0.0, last - stats.backward_ms))
            for bucket in stats.buckets:
                took_ms = bucket.ended_ms - bucket.began_ms
                assert 0 <= bucket.exposed_ms <= took_ms + 1e-6  # rounded
                assert bucket.exposed_ms <= stats.exposed_ms

    @pytest.mark.alone
    def test_hidden_reduction_is_not_exposed(self) -> None:
        """Backward goes on computing long after the first bucket has been reduced."""

        def run() -> DDPStats:
            ddp = wrap()
            step(ddp)
            ddp.module[0].weight.register_hook(lambda _: burn(0.2))
            step(ddp)
            return ddp.stats()

        for stats in run_ranks(2, run):
            first, last = stats.buckets[0], stats.buckets[-1]
            assert first.exposed_ms == 0
            assert first.ended_ms < last.ready_ms

    @pytest.mark.alone
    def test_waiting_for_a_slow_rank_is_exposed(self) -> None:
        def run() -> DDPStats:
            ddp = wrap()
            step(ddp)
            if dist.get_rank() == 1:
                ddp.module[0].weight.register_hook(lambda _: burn(0.3))
            step(ddp)
            return ddp.stats()

        fast, slow = run_ranks(2, run)
        assert fast.exposed_ms > slow.exposed_ms
        assert fast.backward_ms < slow.backward_ms

    def test_with_a_communication_hook(self) -> None:
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def run() -> DDPStats:
            ddp = wrap()
            ddp.register_comm_hook(None, hook)
            step(ddp)
            step(ddp)
            return ddp.stats()

        for stats in run_ranks(2, run):
            for bucket in stats.buckets:
                assert 0 < bucket.ready_ms <= bucket.began_ms <= bucket.ended_ms
                assert bucket.last_rank in (0, 1)


@pytest.mark.alone
class TestLastRank:
    def test_is_the_one_that_computes_longest(self) -> None:
        """In the first step, when there is one bucket, and later, when there are three."""

        def last_ranks(slow: int) -> list[list[int]]:
            ddp = wrap()
            if dist.get_rank() == slow:
                ddp.module[2].weight.register_hook(lambda _: burn(0.1))
            found = []
            for _ in range(2):
                step(ddp)
                found.append([bucket.last_rank for bucket in ddp.stats().buckets])
            return found

        def run() -> list[list[list[int]]]:
            return [last_ranks(slow) for slow in range(3)]

        for per_slow in run_ranks(3, run):
            assert per_slow == [[[slow], [slow] * 3] for slow in range(3)]

    def test_also_when_it_is_late_before_the_backward(self) -> None:
        def run() -> list[int]:
            ddp = wrap()
            for _ in range(2):
                step(ddp)
            if dist.get_rank() == 1:
                burn(0.1)
            step(ddp)
            return [bucket.last_rank for bucket in ddp.stats().buckets]

        assert run_ranks(2, run) == [[1, 1, 1], [1, 1, 1]]

    def test_is_per_bucket(self) -> None:
        """Rank 0 is late with the first bucket, rank 1 is later still with the last."""

        def run() -> list[int]:
            ddp = wrap()
            step(ddp)
            if dist.get_rank() == 0:
                ddp.module[2].weight.register_hook(lambda _: burn(0.1))
            else:
                ddp.module[0].weight.register_hook(lambda _: burn(0.4))
            step(ddp)
            return [bucket.last_rank for bucket in ddp.stats().buckets]

        for found in run_ranks(2, run):
            assert (found[0], found[2]) == (0, 1)
