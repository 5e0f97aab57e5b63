"""Train a recommender: tables on parameter servers, the dense part under DDP, by one command.

    python examples/recommender.py                                    2 trainers, 2 servers
    torchrun --nproc-per-node 2 examples/recommender.py               the same under torchrun

The click log is synthetic, with a structure to find: users and items have hidden factors, contexts
a hidden effect, and a click is likelier the better they fit. The AUC on held-out examples says how
well the model tells clicks from non-clicks: 0.5 is chance, and the hidden probabilities give the
optimum.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from paceline import DistributedDataParallel, ps
from paceline.testing import run_ranks

USERS, ITEMS, CONTEXTS = 400, 300, 40
CONTEXTS_EACH = 3
HIDDEN, DIM = 3, 16
BATCH = 512


@dataclass(frozen=True)
class ClickLog:
    """Who saw what in which contexts, how likely a click was, and whether there was one."""

    users: Tensor
    items: Tensor
    contexts: Tensor
    chances: Tensor
    clicks: Tensor

    def rows(self, which: Tensor | slice) -> ClickLog:
        """Return some of its examples."""
        return ClickLog(
            self.users[which],
            self.items[which],
            self.contexts[which],
            self.chances[which],
            self.clicks[which],
        )

    def bags(self) -> dict[str, Tensor]:
        """Return it as the tables take it: one row of ids for each example."""
        return {"user": self.users[:, None], "item": self.items[:, None], "context": self.contexts}


def make_log(examples: int, seed: int) -> ClickLog:
    """Draw examples; the hidden structure is the same for every seed."""
    hidden = torch.Generator().manual_seed(0)
    user_factors = torch.randn(USERS, HIDDEN, generator=hidden)
    item_factors = torch.randn(ITEMS, HIDDEN, generator=hidden)
    effects = torch.randn(CONTEXTS, generator=hidden)
    chance = torch.Generator().manual_seed(seed)
    users = torch.randint(USERS, (examples,), generator=chance)
    items = torch.randint(ITEMS, (examples,), generator=chance)
    contexts = torch.randint(CONTEXTS, (examples, CONTEXTS_EACH), generator=chance)
    fit = (user_factors[users] * item_factors[items]).sum(1)
    chances = torch.sigmoid(1.5 * fit + 0.7 * effects[contexts].sum(1) - 0.5)
    clicks = (torch.rand(examples, generator=chance) < chances).float()
    return ClickLog(users, items, contexts, chances, clicks)


class Recommender(nn.Module):
    """Rows of the three tables, and a small network on them and on how user and item fit."""

    def __init__(self, tables: ps.EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        self.dense = nn.Sequential(nn.Linear(4 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, bags: dict[str, Tensor]) -> Tensor:
        """Predict a click, as a logit."""
        rows = self.tables(bags)
        user, item = rows["user"], rows["item"]
        features = torch.cat([user, item, user * item, rows["context"]], 1)
        logits: Tensor = self.dense(features).squeeze(1)
        return logits


def auc(scores: Tensor, clicks: Tensor) -> float:
    """Return the chance that a click scores higher than a non-click."""
    ranks = scores.argsort().argsort().double() + 1
    positive = clicks.bool()
    n, m = int(positive.sum()), int((~positive).sum())
    return (ranks[positive].sum().item() - n * (n + 1) / 2) / (n * m)


def make_tables(servers: ps.Servers, world: int) -> ps.EmbeddingBagCollection:
    """Make three tables; the servers run their optimizer."""
    small = ps.Init(ps.Start.NORMAL, 0.0, 0.1)
    tables = [
        ps.TableConfig("user", USERS, DIM, mode="sum", init=small),
        ps.TableConfig("item", ITEMS, DIM, mode="sum", init=small),
        ps.TableConfig("context", CONTEXTS, DIM, mode="sum", init=small, sharding="table"),
    ]
    # Each trainer pushes its own gradient; with 1/world they add up to the mean, as in DDP.
    return ps.EmbeddingBagCollection(
        tables, servers=servers, optimizer=ps.Adagrad(lr=0.2), grad_scale=1 / world
    )


def train(addresses: list[str], args: argparse.Namespace) -> None:
    """Train, as one trainer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    log = make_log(args.examples, seed=1).rows(slice(rank, None, world))
    torch.manual_seed(0)
    with ps.connect(addresses) as servers:
        tables = make_tables(servers, world)
        model = DistributedDataParallel(Recommender(tables))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        steps = len(log.users) // BATCH
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=rank != 0) as progress:
            task = progress.add_task("training", total=args.epochs * steps)
            for epoch in range(args.epochs):
                order = torch.randperm(
                    len(log.users), generator=torch.Generator().manual_seed(epoch)
                )
                batches = [log.rows(each) for each in order.split(BATCH)[:steps]]
                inputs = [each.bags() for each in batches]
                total = 0.0
                for at, batch in enumerate(batches):
                    logits = model(inputs[at])
                    if at + 1 < steps:
                        tables.prefetch(inputs[at + 1])  # sent right behind this batch's push
                    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    total += loss.item() / steps
                    progress.advance(task)
                if rank == 0:
                    progress.print(f"epoch {epoch + 1}  loss {total:.4f}")
        servers.flush()
        dist.barrier()  # after this, every trainer's pushes are applied
        if rank == 0:
            report(model.module)
        dist.barrier()


def report(model: nn.Module) -> None:
    """Measure it on held-out examples."""
    held_out = make_log(20_000, seed=2)
    with torch.no_grad():
        found = auc(model(held_out.bags()), held_out.clicks)
    best = auc(held_out.chances, held_out.clicks)
    print(f"AUC {found:.3f}; chance is 0.500, possible {best:.3f}: missing {best - found:.3f}")


def main() -> None:
    """Start servers and trainers, or join those that torchrun started."""
    parser = argparse.ArgumentParser(description="Train a recommender with parameter servers.")
    parser.add_argument("--trainers", type=int, default=2, help="default: 2; torchrun has its own")
    parser.add_argument("--servers", type=int, default=2, help="default: 2")
    parser.add_argument("--examples", type=int, default=60_000, help="default: 60000")
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        with ps.local(args.servers) as servers:
            run_ranks(args.trainers, train, servers.addresses, args, timeout_s=600)
        return
    dist.init_process_group("gloo")
    try:
        train_under_torchrun(args)
    finally:
        dist.destroy_process_group()


def train_under_torchrun(args: argparse.Namespace) -> None:
    """Start the servers on rank 0, and tell the others where they are."""
    servers = ps.local(args.servers) if dist.get_rank() == 0 else None
    try:
        addresses = [servers.addresses if servers else []]
        dist.broadcast_object_list(addresses)
        train(addresses[0], args)
    finally:
        if servers:
            servers.close()


if __name__ == "__main__":
    main()
