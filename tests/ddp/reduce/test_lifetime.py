"""What a wrapper owns goes when it goes: by reference counts, without waiting for the collector."""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef

from paceline import DistributedDataParallel as DDP
from paceline.errors import StepError
from paceline.testing import run_ranks
from tests.ddp.reduce.lifetime_cases import (
    VARIANTS,
    Gradients,
    MarkedNet,
    build,
    expected,
    gradients,
    no_collector,
    step,
)


def wait_expired(memory: list[StorageWeakRef]) -> bool:
    """Gloo's own thread lets go of a tensor a moment after the work is done."""
    until_s = time.monotonic() + 60
    while not all(storage.expired() for storage in memory):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


class TestDeletion:
    def test_frees_reducer_and_buckets_at_once(self) -> None:
        def life(options: dict[str, Any], hook: bool) -> tuple[bool, bool, bool]:
            net = build()
            ddp = DDP(net, **options)
            if hook:
                ddp.register_comm_hook(None, allreduce_hook)
            for _ in range(3):
                ddp.zero_grad()
                step(ddp)
            wrapper, reducer = weakref.ref(ddp), weakref.ref(ddp.reducer)
            memory = [StorageWeakRef(b.flat.untyped_storage()) for b in ddp.reducer.buckets]
            ddp.zero_grad()  # gradients are views of the buckets
            assert not any(storage.expired() for storage in memory)
            del ddp
            return wrapper() is None, reducer() is None, wait_expired(memory)

        def run() -> dict[str, tuple[bool, bool, bool]]:
            with no_collector():
                found = {str(options): life(options, hook=False) for options in VARIANTS}
                found["hook"] = life({}, hook=True)
            return found

        for found in run_ranks(2, run):
            assert found == dict.fromkeys(found, (True, True, True))

    def test_rebuilding_frees_the_first_buckets_at_once(self) -> None:
        """Otherwise two sets of gradients are there until the collector runs."""

        def run() -> tuple[bool, bool]:
            with no_collector():
                ddp = DDP(build(), bucket_cap_mb=1e-6)
                step(ddp)
                memory = [StorageWeakRef(b.flat.untyped_storage()) for b in ddp.reducer.buckets]
                ddp.zero_grad()
                step(ddp)
                return len(ddp.reducer.buckets) > len(memory), wait_expired(memory)

        assert run_ranks(2, run) == [(True, True)] * 2

    def test_frees_after_a_forward_without_backward(self) -> None:
        """A graph whose backward may still come keeps the reducer, and takes it along."""

        def run() -> tuple[bool, bool]:
            with no_collector():
                ddp = DDP(build())
                output = ddp(torch.ones(1, 4))
                reducer = weakref.ref(ddp.reducer.runner)
                del ddp
                while_held = reducer() is None
                del output
                return while_held, reducer() is None

        assert run_ranks(1, run) == [(False, True)]

    def test_gradients_outlive_the_wrapper(self) -> None:
        def run() -> Gradients:
            net = build()
            ddp = DDP(net)
            step(ddp)
            del ddp
            return gradients(net)

        for found in run_ranks(2, run):
            torch.testing.assert_close(found, expected([0, 1]))

    def test_module_trains_alone_afterwards(self) -> None:
        """On one rank only: a hook that is left would wait for the other."""

        def run() -> Gradients | None:
            net = build()
            ddp = DDP(net)
            step(ddp)
            with no_collector():
                del ddp
                net.zero_grad()
                if dist.get_rank() == 0:
                    return None
                step(net)
                return gradients(net)

        _, found = run_ranks(2, run)
        torch.testing.assert_close(found, expected([1]))

    def test_after_an_error(self) -> None:
        def run() -> tuple[bool, bool]:
            with no_collector():
                ddp = DDP(MarkedNet())
                markers = ddp.module.markers
                with contextlib.suppress(StepError):
                    ddp(torch.ones(1, 4), spare=False).sum().backward()
                reducer = weakref.ref(ddp.reducer)
                del ddp
                return reducer() is None, markers[0]() is None

        assert run_ranks(2, run) == [(True, True), (True, True)]


class TestCopies:
    def test_deep_copy_of_the_module_has_no_hook(self) -> None:
        def run() -> tuple[Gradients | None, Gradients]:
            ddp = DDP(build())
            step(ddp)
            alone = copy.deepcopy(ddp.module)
            local = None
            if dist.get_rank() == 1:
                alone.zero_grad()
                step(alone)
                local = gradients(alone)
            ddp.zero_grad()
            step(ddp)
            return local, gradients(ddp.module)

        (_, first), (local, second) = run_ranks(2, run)
        torch.testing.assert_close(local, expected([1]))
        for found in (first, second):
            torch.testing.assert_close(found, expected([0, 1]))

    def test_deep_copy_of_the_wrapper_reduces_by_itself(self) -> None:
        def run() -> tuple[Gradients, bool]:
            ddp = DDP(build())
            step(ddp)
            other = copy.deepcopy(ddp)
            other.zero_grad()
            step(other)
            return gradients(other.module), other.reducer is ddp.reducer

        for found, is_shared in run_ranks(2, run):
            torch.testing.assert_close(found, expected([0, 1]))
            assert not is_shared


class TestWrappingTwice:
    def test_one_after_the_other(self) -> None:
        def run() -> list[Gradients]:
            net = build()
            found = []
            for _ in range(3):
                ddp = DDP(net)
                ddp.zero_grad()
                step(ddp)
                found.append(gradients(net))
                del ddp
            return found

        for steps in run_ranks(2, run):
            for found in steps:
                torch.testing.assert_close(found, expected([0, 1]))

    def test_both_alive(self) -> None:
        """Only the one whose forward ran reduces; gradients are averaged once."""

        def run() -> list[Gradients]:
            net = build()
            both = DDP(net), DDP(net)
            found = []
            for ddp in (*both, *both):
                net.zero_grad()
                step(ddp)
                found.append(gradients(net))
            return found

        for steps in run_ranks(2, run):
            for found in steps:
                torch.testing.assert_close(found, expected([0, 1]))


class TestTemporaryWrapper:
    def test_backward_is_reduced_although_nobody_holds_the_wrapper(self) -> None:
        def run() -> torch.Tensor:
            model = nn.Linear(3, 1)
            x = torch.full((1, 3), float(dist.get_rank()))
            DDP(model)(x).sum().backward()
            return model.weight.grad

        for found in run_ranks(2, run):
            assert found.tolist() == [[0.5, 0.5, 0.5]]
