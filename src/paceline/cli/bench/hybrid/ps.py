"""The route over Paceline's own parameter servers.

The command has started the servers and put their addresses into the plan. Each trainer looks up all
tables with one round trip to each server, and pushes their gradients in backward. The dense network
is in Paceline's DDP, with a local optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from paceline import DistributedDataParallel, ps
from paceline.cli.bench.hybrid.model import (
    LEARNING_RATE,
    TORCH_OPTIMIZERS,
    Batch,
    dense_network,
    table_weight,
)
from paceline.cli.bench.hybrid.plan import HybridPlan, OptimizerName, RouteName
from paceline.ps.protocol.optimizers import Optimizer

OPTIMIZERS: dict[OptimizerName, Callable[[float], Optimizer]] = {
    OptimizerName.SGD: ps.SGD,
    OptimizerName.ADAGRAD: ps.Adagrad,
    OptimizerName.ROWWISE_ADAGRAD: ps.RowwiseAdagrad,
    OptimizerName.ADAM: ps.Adam,
}


class PsRoute:
    """Trainers only: the servers are processes of their own."""

    name = RouteName.PS

    def on_master(self, plan: HybridPlan) -> None:
        """Nothing: the command has started the servers."""

    def on_server(self, plan: HybridPlan, server: int) -> None:
        """Nothing: this process serves over RPC only."""

    def on_trainer(self, plan: HybridPlan, group: dist.ProcessGroup) -> PsStep:
        """Connect; the first trainer writes the rows that the other routes begin with."""
        return PsStep(plan, group)


class PsStep:
    """One training step of one trainer."""

    def __init__(self, plan: HybridPlan, group: dist.ProcessGroup) -> None:
        self._every_id = torch.arange(plan.embeddings)
        self._names = [f"table {table}" for table in plan.table_order]
        self._connection = ps.connect(list(plan.ps_addresses))
        self._tables = ps.EmbeddingBagCollection(
            [
                ps.TableConfig(name, plan.embeddings, plan.dim, mode="sum", sharding="table")
                for name in self._names
            ],
            servers=self._connection,
            optimizer=OPTIMIZERS[plan.optimizer](LEARNING_RATE),
        )
        if group.rank() == 0:
            for name, table in zip(self._names, plan.table_order, strict=True):
                self._tables.write(name, self._every_id, table_weight(plan, table))
            self._connection.flush()
        dist.barrier(group)
        network = dense_network(plan.seed)
        self.dense: nn.Module = DistributedDataParallel(network, process_group=group)
        self._announced: dict[str, ps.Bags] | None = None
        self._optimizer = TORCH_OPTIMIZERS[plan.optimizer](
            self.dense.parameters(),
            lr=LEARNING_RATE,  # type: ignore[call-arg]
        )

    def __call__(self, batch: Batch, upcoming: Batch | None = None) -> torch.Tensor:
        """Train on one batch; return its loss. The upcoming one is looked up meanwhile."""
        bags, self._announced = self._announced or self._bags(batch), None
        features = self._tables.joined(bags)
        if upcoming is not None:
            self._announced = self._bags(upcoming)
            self._tables.prefetch(self._announced)
        loss = F.cross_entropy(self.dense(features), batch.targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _bags(self, batch: Batch) -> dict[str, ps.Bags]:
        return dict.fromkeys(self._names, ps.Bags(batch.indices, batch.offsets))

    def read_tables(self) -> list[torch.Tensor]:
        """Fetch all tables as they are now, in the order of the features."""
        return [self._tables.rows(name, self._every_id) for name in self._names]

    def close(self) -> None:
        """Wait for what is on its way, and let go of the servers."""
        self._connection.close()
