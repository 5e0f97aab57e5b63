"""What a wrapper owns goes when it goes: by reference counts, without waiting for the collector."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef

from paceline import DistributedDataParallel as DDP
from paceline.errors import StepError
from paceline.testing import run_ranks

Gradients = dict[str, torch.Tensor]

VARIANTS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False, "bucket_cap_mb": 1e-6},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"nonfinite": "skip"},
]


def build() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.full((3, 4), 0.1 * (1 + dist.get_rank()))
    (model(x).square().sum() * scale).backward()


def gradients(module: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def expected(ranks: list[int]) -> Gradients:
    """The mean over the losses of these ranks."""
    net = build()
    for rank in ranks:
        (net(torch.full((3, 4), 0.1 * (1 + rank))).square().sum() / len(ranks)).backward()
    return gradients(net)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What a cycle keeps alive stays alive in here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def wait_expired(memory: list[StorageWeakRef]) -> bool:
    """Gloo's own thread lets go of a tensor a moment after the work is done."""
    until_s = time.monotonic() + 60
    while not all(storage.expired() for storage in memory):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


class Marker:
    """Sits in a graph and dies with it."""


class Marked(torch.autograd.Function):
    """The identity; its node in the graph holds a marker."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, markers: list[weakref.ref[Marker]]) -> torch.Tensor:
        ctx.marker = Marker()
        markers.append(weakref.ref(ctx.marker))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class MarkedNet(nn.Module):
    """Has a marker in every graph, and a branch that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)
        self.markers: list[weakref.ref[Marker]] = []

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = Marked.apply(self.first(x), self.markers)
        return self.last(hidden) + (self.spare(hidden) if spare else 0)

    def alive(self) -> int:
        return sum(marker() is not None for marker in self.markers)


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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestSteadyState:
    def test_no_object_is_left_by_a_step(self) -> None:
        """With the collector off, every cycle would show."""

        def growth(options: dict[str, Any], steps: int = 50) -> int:
            ddp = DDP(build(), **options)
            for _ in range(5):
                step(ddp)
            before = len(gc.get_objects())
            for _ in range(steps):
                step(ddp)
            return len(gc.get_objects()) - before

        def run() -> dict[str, int]:
            with no_collector():
                growth({})
                return {str(options): growth(options) for options in VARIANTS}

        for found in run_ranks(2, run):
            assert all(objects < 50 for objects in found.values()), found

    def test_memory_does_not_grow(self) -> None:
        """A gradient that is leaked in every step would make it grow twenty times as much."""
        gradient_bytes = 512 * 512 * 4

        def run() -> int:
            ddp = DDP(nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512)))
            x = torch.ones(1, 512)
            before = 0
            for number in range(220):
                if number == 20:
                    before = resident_bytes()
                ddp.zero_grad()
                ddp(x).sum().backward()
            return resident_bytes() - before

        for grown in run_ranks(2, run):
            assert grown < 10 * gradient_bytes

    def test_no_thread_is_left(self) -> None:
        def tasks(expected: int = 0) -> int:
            """A thread that was joined is in the kernel's list for a moment longer."""
            until_s = time.monotonic() + 60
            while True:
                found = len(os.listdir("/proc/self/task"))
                if found <= expected or not expected or time.monotonic() > until_s:
                    return found
                time.sleep(0.01)

        def life() -> None:
            ddp = DDP(build())
            for _ in range(3):
                step(ddp)

        def run() -> tuple[int, int, int]:
            life()  # what torch and gloo start, they start once
            before = tasks()
            life()
            return before, tasks(before), threading.active_count()

        for before, after, python_threads in run_ranks(2, run):
            assert after <= before
            assert python_threads == 1


class TestGraph:
    """The graph of a step is freed when its user lets go of it."""

    def test_after_backward(self) -> None:
        def alive_after_steps(options: dict[str, Any]) -> list[int]:
            ddp = DDP(MarkedNet(), **options)
            alive = []
            for _ in range(3):
                loss = ddp(torch.ones(1, 4)).sum()
                assert ddp.module.alive() == 1
                loss.backward()
                del loss
                alive.append(ddp.module.alive())
            return alive

        def run() -> dict[str, list[int]]:
            with no_collector():
                return {str(options): alive_after_steps(options) for options in VARIANTS}

        for found in run_ranks(2, run):
            assert found == {options: [0, 0, 0] for options in found}

    def test_without_backward(self) -> None:
        def run() -> int:
            with no_collector():
                ddp = DDP(MarkedNet())
                for _ in range(3):
                    ddp(torch.ones(1, 4))
                return ddp.module.alive()

        assert run_ranks(1, run) == [0]

    def test_with_a_communication_hook(self) -> None:
        def run() -> int:
            with no_collector():
                ddp = DDP(MarkedNet())
                ddp.register_comm_hook(None, allreduce_hook)
                for _ in range(3):
                    ddp(torch.ones(1, 4)).sum().backward()
                return ddp.module.alive()

        assert run_ranks(2, run) == [0, 0]

    def test_after_an_error_of_the_step(self) -> None:
        def run() -> tuple[int, int]:
            with no_collector():
                ddp = DDP(MarkedNet())
                failures = 0
                for _ in range(3):
                    ddp.zero_grad()
                    try:
                        ddp(torch.ones(1, 4), spare=False).sum().backward()
                    except StepError:
                        failures += 1
                return failures, ddp.module.alive()

        assert run_ranks(2, run) == [(3, 0), (3, 0)]

    def test_after_an_exception_in_backward(self) -> None:
        """The step is completed by the next forward; until then only its buckets are kept."""

        def run() -> tuple[int, int]:
            with no_collector():
                ddp = DDP(MarkedNet())
                handle = ddp.module.first.weight.register_hook(lambda _: 1 / 0)
                failures = 0
                for _ in range(3):
                    try:
                        ddp(torch.ones(1, 4)).sum().backward()
                    except ZeroDivisionError:
                        failures += 1
                assert ddp.module.alive() == 0
                handle.remove()
                ddp.zero_grad()
                ddp(torch.ones(1, 4)).sum().backward()
                return failures, ddp.module.alive()

        assert run_ranks(2, run) == [(3, 0), (3, 0)]


class TestFailedSteps:
    def test_leave_no_object_behind(self) -> None:
        def fail(ddp: DDP) -> None:
            ddp.zero_grad()
            with contextlib.suppress(StepError):
                ddp(torch.ones(1, 4), spare=False).sum().backward()

        def run() -> int:
            with no_collector():
                ddp = DDP(MarkedNet())
                for _ in range(5):
                    fail(ddp)
                ddp.module.markers.clear()
                before = len(gc.get_objects())
                for _ in range(30):
                    fail(ddp)
                ddp.module.markers.clear()
                return len(gc.get_objects()) - before

        for objects in run_ranks(2, run):
            assert objects < 30


class TestTemporaryWrapper:
    def test_backward_is_reduced_although_nobody_holds_the_wrapper(self) -> None:
        def run() -> torch.Tensor:
            model = nn.Linear(3, 1)
            x = torch.full((1, 3), float(dist.get_rank()))
            DDP(model)(x).sum().backward()
            return model.weight.grad

        for found in run_ranks(2, run):
            assert found.tolist() == [[0.5, 0.5, 0.5]]
