"""The routes over torch RPC: torch's recipe for hybrid training, with torch's DDP or with ours.

The best honest shape of that recipe: each server holds one RemoteModule with all its tables, so a
batch costs one call for each server, and the calls to all servers are under way at once. Gradients
flow back in distributed autograd, and one DistributedOptimizer steps tables and dense network. The
master makes the modules and sends them to the trainers; the servers only serve.
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.nn import functional as F

from paceline import DistributedDataParallel
from paceline.cli.bench.hybrid.model import (
    LEARNING_RATE,
    TORCH_OPTIMIZERS,
    Batch,
    Tables,
    dense_network,
)
from paceline.cli.bench.hybrid.plan import HybridPlan, Role, RouteName

TIMEOUT_S = 60.0
# What the master has sent, by the route's name.
_deliveries: dict[str, queue.SimpleQueue[Any]] = {
    route.value: queue.SimpleQueue() for route in RouteName
}


def name_of(role: Role, number: int) -> str:
    """Return the name by which RPC knows a process."""
    return f"{role.value}{number}"


@contextmanager
def rpc_agent(plan: HybridPlan, rank: int) -> Iterator[None]:
    """Take part in RPC; leaves when all processes do. The first rank keeps the meeting point."""
    _silence_torch()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{plan.master_addr}:{plan.master_port}", rpc_timeout=TIMEOUT_S
    )
    rpc.init_rpc(
        name_of(*plan.role_of(rank)),
        rank=rank,
        world_size=plan.world,
        rpc_backend_options=options,
    )
    yield
    rpc.shutdown(timeout=TIMEOUT_S)


def _silence_torch() -> None:
    """Drop what torch's RPC says about its own age, also where it insists ("always")."""
    show = warnings.showwarning

    def showwarning(message: Any, category: type[Warning], *rest: Any) -> None:
        if not issubclass(category, (DeprecationWarning, FutureWarning)):
            show(message, category, *rest)

    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "You are using a Backend")
    warnings.showwarning = showwarning  # type: ignore[assignment]


class RpcRoute:
    """One of the two routes, in whichever process."""

    def __init__(self, name: RouteName) -> None:
        self.name = name

    def on_master(self, plan: HybridPlan) -> None:
        """Make the servers' modules and tell the trainers."""
        from torch.distributed.nn.api.remote_module import RemoteModule

        modules = [
            RemoteModule(f"{name_of(Role.SERVER, server)}/cpu", Tables, args=(plan, server))
            for server in range(plan.servers)
        ]
        for trainer in range(plan.trainers):
            rpc.rpc_sync(name_of(Role.TRAINER, trainer), _deliver, args=(self.name.value, modules))

    def on_server(self, plan: HybridPlan, server: int) -> None:
        """Nothing: the RPC agent serves."""

    def on_trainer(self, plan: HybridPlan, group: dist.ProcessGroup) -> RpcStep:
        """Take the servers' modules, wrap the dense network."""
        modules = _deliveries[self.name.value].get(timeout=TIMEOUT_S)
        return RpcStep(plan, modules, self._wrap(dense_network(plan.seed), group))

    def _wrap(self, network: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        if self.name is RouteName.RPC_TORCH:
            return nn.parallel.DistributedDataParallel(network, process_group=group)
        return DistributedDataParallel(network, process_group=group)


class RpcStep:
    """One training step of one trainer."""

    def __init__(self, plan: HybridPlan, tables: list[Any], dense: nn.Module) -> None:
        from torch.distributed.optim import DistributedOptimizer

        self.dense = dense
        self._tables = tables
        remote = [rref for module in tables for rref in module.remote_parameters()]
        local = [rpc.RRef(parameter) for parameter in dense.parameters()]
        self._optimizer = DistributedOptimizer(
            TORCH_OPTIMIZERS[plan.optimizer], [*remote, *local], lr=LEARNING_RATE
        )

    def __call__(self, batch: Batch, upcoming: Batch | None = None) -> torch.Tensor:
        """Train on one batch; return its loss. RPC has nothing to announce the next one with."""
        with dist_autograd.context() as context:
            calls = [module.forward_async(batch.indices, batch.offsets) for module in self._tables]
            features = torch.cat([call.wait() for call in calls], dim=1)
            loss = F.cross_entropy(self.dense(features), batch.targets)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            self._optimizer.step(context)
            return loss.detach()

    def read_tables(self) -> list[torch.Tensor]:
        """Fetch all tables as they are now, in the order of the features."""
        return [
            rpc.rpc_sync(rref.owner(), _value, args=(rref,))
            for module in self._tables
            for rref in module.remote_parameters()
        ]

    def close(self) -> None:
        """Let go of what the servers hold for this trainer."""
        self._tables.clear()
        del self._optimizer


def _deliver(route: str, modules: list[Any]) -> None:
    _deliveries[route].put(modules)


def _value(rref: Any) -> torch.Tensor:
    value: torch.Tensor = rref.local_value().detach()
    return value
