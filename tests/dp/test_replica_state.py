"""Hooks, running statistics and buffers: what replicas see and may write."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

import paceline
from tests.dp.compare import CPUS, assert_same_as_plain


def test_hooks_of_parameters_see_the_sum_once() -> None:
    model = nn.Linear(4, 4)
    seen: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    model.weight.register_hook(lambda g: seen.append(g.clone()))
    model.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    x = torch.randn(6, 4)
    paceline.DataParallel(model, ["cpu"] * 3)(x).sum().backward()
    expected = x.sum(0).expand(4, 4)
    assert len(seen) == len(after) == 1
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(after[0], expected)


def test_hooks_of_modules_run_for_each_replica_with_the_replica() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    lock = threading.Lock()
    calls: list[tuple[str, bool, int]] = []

    def note(kind: str, module: nn.Module, size: int) -> None:
        with lock:
            calls.append((kind, module is model[0], size))

    model[0].register_forward_pre_hook(lambda m, args: note("pre", m, len(args[0])))
    model[0].register_forward_hook(lambda m, _, out: note("forward", m, len(out)))
    model[0].register_full_backward_hook(lambda m, _, out: note("backward", m, len(out[0])))
    x = torch.randn(5, 4, requires_grad=True)
    paceline.DataParallel(model, CPUS)(x).sum().backward()
    assert sorted(calls) == sorted(
        (kind, False, size) for kind in ("pre", "forward", "backward") for size in (3, 2)
    )


def test_a_forward_hook_may_change_the_output() -> None:
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda m, args, out: out * 3)
    assert_same_as_plain(model, torch.randn(6, 4))


def test_running_statistics_are_those_of_replica_0() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    plain = copy.deepcopy(model)
    second = copy.deepcopy(model)
    x = torch.randn(9, 4)
    mean = model[1].running_mean
    parallel = paceline.DataParallel(model, CPUS)
    for _ in range(3):
        found = parallel(x)
        pieces = x.chunk(2)
        torch.testing.assert_close(found, torch.cat([plain(pieces[0]), second(pieces[1])]))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    assert model[1].running_mean is mean
    assert model[1].num_batches_tracked == 3


def test_running_statistics_without_gradients() -> None:
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        paceline.DataParallel(model, CPUS)(torch.randn(4, 3))
    assert model.num_batches_tracked == 1


class Counter(nn.Module):
    """Writes its buffers in all ways there are; slowly, so that races would show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.in_place.clone()
        for _ in range(20):
            self.in_place.add_(1)
            time.sleep(0)
        seen = self.in_place - before
        self.assigned = self.assigned + 1
        if self.late is None:
            self.late = torch.ones(())
        return x * 0 + seen


def test_buffers_are_written_by_replica_0_alone_and_no_replica_sees_another() -> None:
    model = nn.Sequential(Counter())
    parallel = paceline.DataParallel(model, ["cpu"] * 4)
    for step in range(1, 6):
        out = parallel(torch.zeros(4))
        assert out.tolist() == [20.0] * 4
        assert model[0].in_place.item() == 20 * step
        assert model[0].assigned.item() == step
    assert model[0].late.item() == 1
    assert set(dict(model.named_buffers())) == {"0.in_place", "0.assigned", "0.late"}


def test_buffers_stay_written_when_a_replica_fails() -> None:
    class Fails(Counter):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("later")

    model = Fails()
    with pytest.raises(ValueError, match="later"):
        paceline.DataParallel(model, CPUS)(torch.zeros(2))
    assert (model.in_place.item(), model.assigned.item()) == (20, 1)


def test_writing_a_shared_parameter_is_an_error() -> None:
    class Clips(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(2, 2), Clips(2, 2))
    with pytest.raises(RuntimeError, match=r"parameters: 1\.weight\.") as caught:
        paceline.DataParallel(model, CPUS)(torch.zeros(4, 2))
    assert isinstance(caught.value, paceline.errors.SharedWriteError)
    assert caught.value.parameters == ("1.weight",)
    with pytest.raises(paceline.errors.SharedWriteError):
        paceline.data_parallel(model, torch.zeros(4, 2), CPUS)
    # One replica writes alone.
    assert paceline.DataParallel(model, CPUS)(torch.zeros(1, 2)).shape == (1, 2)
