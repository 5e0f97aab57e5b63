"""Uses that keep state: checkpoints, sharded optimizers; and DataLoader workers beside a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline
from tests.shm.c10d.sharded import line, net, shard, train


def fresh(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def save_load_and_go_on(folder: Path, make: Any, is_async: bool) -> Any:
    """Train, save; then load into another model, and train both on: they stay equal."""
    rank = dist.get_rank()
    model, optimizer = fresh(make())
    train(model, rank, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if is_async:
        dcp.async_save(state, checkpoint_id=folder / "saved").result(100)
    else:
        dcp.save(state, checkpoint_id=folder / "saved")
    other, its_optimizer = fresh(make())
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder / "saved")
    set_state_dict(
        other,
        its_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    went_on = train(model, rank, optimizer)
    resumed = train(other, rank, its_optimizer)
    for left, right in zip(went_on, resumed, strict=True):
        assert torch.equal(full(left), full(right))
    return resumed


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def checkpoints_a_sharded_model(folder: Path) -> Any:
    return save_load_and_go_on(folder, lambda: shard(net(), line()), is_async=False)


def checkpoints_a_sharded_model_in_the_background(folder: Path) -> Any:
    return save_load_and_go_on(folder, lambda: shard(net(), line()), is_async=True)


def checkpoints_torchs_wrapper(folder: Path) -> Any:
    return save_load_and_go_on(folder, lambda: TorchDDP(net()), is_async=False)


def checkpoints_our_wrapper(folder: Path) -> Any:
    return save_load_and_go_on(
        folder, lambda: paceline.DistributedDataParallel(net()), is_async=False
    )


def checkpoints_our_wrapper_in_the_background(folder: Path) -> Any:
    return save_load_and_go_on(
        folder, lambda: paceline.DistributedDataParallel(net()), is_async=True
    )


def sharded_optimizer_trains(_: Path) -> Any:
    model = TorchDDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    return train(model, dist.get_rank(), optimizer)


def sharded_optimizer_consolidates(_: Path) -> Any:
    model = paceline.DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    train(model, dist.get_rank(), optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() != 0:
        return None
    state = optimizer.state_dict()
    return [sorted(state["state"]), [state["state"][i]["exp_avg"] for i in sorted(state["state"])]]


# --- DataLoader workers ------------------------------------------------------------------------


def load_with(context: str, persistent: bool = False) -> Any:
    """Two epochs, training in between: workers come and go beside a group that is in use."""
    data = TensorDataset(torch.arange(48.0).view(24, 2))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=sampler,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    torch.manual_seed(0)
    model = TorchDDP(nn.Linear(2, 3))
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            model.zero_grad()
            model(inputs / 48).pow(2).mean().backward()
            found.append(model.module.weight.grad.clone())
    del loader
    dist.barrier()
    return found


def loads_with_forked_workers(_: Path) -> Any:
    return load_with("fork")


def loads_with_persistent_forked_workers(_: Path) -> Any:
    return load_with("fork", persistent=True)


def loads_with_workers_of_a_forkserver(_: Path) -> Any:
    return load_with("forkserver", persistent=True)


def loads_with_spawned_workers(_: Path) -> Any:
    return load_with("spawn", persistent=True)


ON_TWO = [
    checkpoints_a_sharded_model,
    checkpoints_a_sharded_model_in_the_background,
    checkpoints_torchs_wrapper,
    checkpoints_our_wrapper,
    checkpoints_our_wrapper_in_the_background,
    sharded_optimizer_trains,
    sharded_optimizer_consolidates,
    loads_with_forked_workers,
    loads_with_persistent_forked_workers,
]
# Each worker imports torch.
SLOW = [loads_with_workers_of_a_forkserver, loads_with_spawned_workers]
