"""Hybrid models over RPC: local layers, a remote one between them, DDP inside, outside or nowhere.

Ranks 0 and 1 train, rank 2 serves. torch's DDP and plain local training are the references.
"""

from __future__ import annotations

import copy
import enum
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import TorchDDP, assert_close, assert_identical, batch
from tests.ddp.rpc.over_rpc import named, with_rpc

pytestmark = pytest.mark.skipif(
    not rpc.is_available(), reason="this build of torch has no torch.distributed.rpc"
)

TRAINERS, SERVER = (0, 1), "rank2"


class Mode(enum.Enum):
    NONE = "no DDP"
    INSIDE = "DDP around the layer behind the remote one"
    OUTSIDE = "DDP around everything that is local"


class Served(nn.Module):
    """The remote layer; can be asked for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        # Not the global generator: the server makes one for each trainer, on two threads at once.
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def gradients_of(served: Any, context: int) -> dict[str, Tensor]:
    return named(served.local_value(), context)


class Hybrid(nn.Module):
    """A local layer, the remote one, and another local one."""

    def __init__(self, served: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.served = [served]  # in a list: a RemoteModule is a module, but not a local one

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.served[0](self.first(x)))


def wrap(hybrid: Hybrid, mode: Mode, wrapper: type[nn.Module], group: Any) -> nn.Module:
    if mode is Mode.INSIDE:
        hybrid.second = wrapper(hybrid.second, process_group=group)
    return wrapper(hybrid, process_group=group) if mode is Mode.OUTSIDE else hybrid


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    return model(batch(step, rank)).square().mean()


def plain_gradients(model: Hybrid, served: nn.Module, step: int) -> list[dict[str, Tensor]]:
    """Train local copies of all layers on each trainer's batch; return its gradients by name."""
    found = []
    for rank in TRAINERS:
        first, second, remote = (copy.deepcopy(m) for m in (model.first, model.second, served))
        parts = {"first": first, "second": second, "served": remote}
        second(remote(first(batch(step, rank)))).square().mean().backward()
        found.append(
            {f"{p}.{n}": w.grad for p, part in parts.items() for n, w in part.named_parameters()}
        )
    return found


def check_mode(mode: Mode) -> None:
    from torch.distributed.nn.api.remote_module import RemoteModule

    group = dist.new_group(TRAINERS)
    if dist.get_rank() not in TRAINERS:
        return
    served = RemoteModule(f"{SERVER}/cpu", Served)
    plain = Hybrid(served)
    ours, theirs = (wrap(copy.copy(Hybrid(served)), mode, kind, group) for kind in (DDP, TorchDDP))
    averaged = {Mode.NONE: (), Mode.INSIDE: ("second",), Mode.OUTSIDE: ("first", "second")}[mode]
    sentinels = [torch.full_like(p, 5.0) for p in ours.parameters()]
    for parameter, sentinel in zip(ours.parameters(), sentinels, strict=True):
        parameter.grad = sentinel
    for step in range(3):
        found = []
        for model in (ours, theirs):
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [loss_of(model, step)])
                local = {
                    name.replace(".module", ""): g for name, g in named(model, context).items()
                }
                args = (served.get_module_rref(), context)
                remote = rpc.rpc_sync(SERVER, gradients_of, args=args)
            found.append(local | {f"served.{name}": g for name, g in remote.items()})
        assert_identical(found[0], found[1], f"{mode.value}, against torch's DDP:")
        each = plain_gradients(plain, Served(), step)
        mine = each[TRAINERS.index(dist.get_rank())]
        expected = {
            name: sum(g[name] for g in each) / 2 if name.startswith(averaged) else mine[name]
            for name in mine
        }
        assert_close(found[0], expected, mode.value)
    for parameter, sentinel in zip(ours.parameters(), sentinels, strict=True):
        assert parameter.grad is sentinel, ".grad is not touched in a context"
        assert torch.equal(sentinel, torch.full_like(sentinel, 5.0))


@pytest.mark.parametrize("mode", Mode)
def test_modes(mode: Mode) -> None:
    run_ranks(3, with_rpc, lambda: check_mode(mode))


def test_distributed_optimizer_steps_with_averages() -> None:
    """Ranks stay equal, and end where plain training on both batches ends."""

    def check() -> None:
        from torch.distributed.optim import DistributedOptimizer

        warnings.showwarning = lambda *_: None  # torch insists on a deprecation of its own
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        plain = copy.deepcopy(model)
        ddp = DDP(model)
        distributed = DistributedOptimizer(
            torch.optim.SGD, [rpc.RRef(p) for p in ddp.parameters()], lr=0.1
        )
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(4):
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [loss_of(ddp, step)])
                distributed.step(context)
            optimizer.zero_grad()
            (sum(loss_of(plain, step, rank) for rank in range(2)) / 2).backward()
            optimizer.step()
        assert_close(dict(model.state_dict()), dict(plain.state_dict()))

    run_ranks(2, with_rpc, check)
