"""Uses of FSDP2, DTensor and device meshes. All groups have two ranks: sums have gloo's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline

STEPS = 3


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def batch(index: int, of: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + of)
    return torch.randn(6, 8, generator=generator)


def train(model: nn.Module, index: int, optimizer: Any = None) -> list[torch.Tensor]:
    """A few steps on the batches of this replica: every loss, then every parameter."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(index, step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("line",))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


def shard(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


# --- two ranks ---------------------------------------------------------------------------------


def fsdp_trains(_: Path) -> Any:
    return train(shard(net(), line()), dist.get_rank())


def fsdp_in_mixed_precision(_: Path) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(shard(net(), line(), mp_policy=policy), dist.get_rank())


def fsdp_reduces_in_bfloat16(_: Path) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return train(shard(net(), line(), mp_policy=policy), dist.get_rank())


def fsdp_without_resharding(_: Path) -> Any:
    return train(shard(net(), line(), reshard_after_forward=False), dist.get_rank())


def fsdp_offloads(_: Path) -> Any:
    policy = CPUOffloadPolicy(pin_memory=False)
    return train(shard(net(), line(), offload_policy=policy), dist.get_rank())


def fsdp_accumulates(_: Path) -> Any:
    model = shard(net(), line())
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
        model(batch(dist.get_rank(), step)).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm.full_tensor(), *(p.grad for p in model.parameters())]  # type: ignore[attr-defined]


def fsdp_equals_ddp(_: Path) -> Any:
    """Sharded and replicated training end with the same parameters, up to rounding."""
    sharded, replicated = shard(net(), line()), TorchDDP(net())
    train(sharded, dist.get_rank())
    train(replicated, dist.get_rank())
    for ours, theirs in zip(sharded.parameters(), replicated.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())  # type: ignore[attr-defined]
    return "equal"


def dtensor_redistributes(_: Path) -> Any:
    mesh, whole = line(), torch.arange(35.0).view(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    return rows, columns, columns.redistribute(mesh, [Replicate()]), columns.full_tensor()


def dtensor_computes(_: Path) -> Any:
    mesh = line()
    left = distribute_tensor(torch.randn(6, 8), mesh, [Shard(1)])
    right = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
    partial = left @ right
    return partial.full_tensor(), (left.sum() + right.mean()).full_tensor()


def dtensor_module_trains(_: Path) -> Any:
    """Replicated parameters, inputs that lie on the ranks row by row."""
    mesh = line()
    model = distribute_module(net(), mesh)
    inputs: Any = distribute_tensor(batch(0, 0), mesh, [Shard(0)])
    loss = model(inputs).pow(2).mean()
    loss.backward()
    return [loss.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())]


def tensor_parallel_trains(_: Path) -> Any:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return train(parallelize_module(model, line(), plan), 0)


# --- four ranks, two by two --------------------------------------------------------------------


def mesh_has_groups(_: Path) -> Any:
    mesh = square()
    found = []
    for name in ("rows", "columns"):
        part = mesh[name]
        tensor = torch.tensor([float(10 ** dist.get_rank())])
        dist.all_reduce(tensor, group=part.get_group())
        found.append(
            [tensor, part.get_local_rank(), dist.get_process_group_ranks(part.get_group())]
        )
    return [*found, mesh.get_coordinate(), mesh["rows", "columns"]._flatten("all").size()]


def fsdp_on_two_dimensions(_: Path) -> Any:
    """Replicated over rows, sharded over columns."""
    return train(shard(net(), square()), dist.get_rank())


def fsdp_with_tensor_parallel(_: Path) -> Any:
    mesh, plan = square(), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = parallelize_module(model, mesh["columns"], plan)  # type: ignore[assignment]
    fully_shard(model, mesh=mesh["rows"])
    return train(model, mesh.get_local_rank("rows"))


def torch_ddp_on_a_submesh(_: Path) -> Any:
    mesh = square()
    model = TorchDDP(net(), device_mesh=mesh["rows"])
    return train(model, mesh.get_local_rank("rows"))


def paceline_ddp_on_a_submesh(_: Path) -> Any:
    mesh = square()
    model = paceline.DistributedDataParallel(net(), device_mesh=mesh["rows"])
    return train(model, mesh.get_local_rank("rows"))


def ddp_with_tensor_parallel(_: Path) -> Any:
    """Torch's recipe: tensor parallelism inside, data parallelism over the other dimension."""
    mesh, plan = square(), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = parallelize_module(model, mesh["columns"], plan)  # type: ignore[assignment]
    wrapped = TorchDDP(model, device_mesh=mesh["rows"])
    return train(wrapped, mesh.get_local_rank("rows"))


def dtensor_on_two_dimensions(_: Path) -> Any:
    mesh, whole = square(), torch.randn(5, 6)
    parts = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    turned = parts.redistribute(mesh, [Replicate(), Shard(0)])
    return parts, turned, turned.full_tensor()


ON_TWO = [
    fsdp_trains,
    fsdp_in_mixed_precision,
    fsdp_reduces_in_bfloat16,
    fsdp_without_resharding,
    fsdp_offloads,
    fsdp_accumulates,
    fsdp_equals_ddp,
    dtensor_redistributes,
    dtensor_computes,
    dtensor_module_trains,
    tensor_parallel_trains,
]
ON_FOUR = [
    mesh_has_groups,
    fsdp_on_two_dimensions,
    fsdp_with_tensor_parallel,
    torch_ddp_on_a_submesh,
    paceline_ddp_on_a_submesh,
    ddp_with_tensor_parallel,
    dtensor_on_two_dimensions,
]
