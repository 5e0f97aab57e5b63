"""More of :mod:`~tests.shm.contract.cases`: messages, objects, lists, and what torch builds on."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.shm.contract.cases import case, me

# --- point to point ------------------------------------------------------------------------------


@case(2)
def messages_are_told_apart_by_tag() -> None:
    rank, world = me()
    after, before = (rank + 1) % world, (rank - 1) % world
    sends = [dist.isend(torch.full((9,), tag), after, tag=tag) for tag in range(5)]
    for tag in reversed(range(5)):
        tensor = torch.zeros(9, dtype=torch.int64)
        dist.irecv(tensor, before, tag=tag).wait()
        assert tensor.tolist() == [tag] * 9
    for send in sends:
        send.wait()


@case(2)
def messages_from_anybody() -> None:
    rank, world = me()
    if rank:
        dist.send(torch.full((1000,), float(rank)), 0)
    else:
        seen = set()
        for _ in range(1, world):
            tensor = torch.zeros(1000)
            source = dist.recv(tensor)
            assert bool((tensor == source).all())
            seen.add(source)
        assert seen == set(range(1, world))
    dist.barrier()


@case(2)
def messages_in_batches_beside_collectives() -> None:
    rank, world = me()
    after, before = (rank + 1) % world, (rank - 1) % world
    large, received = torch.full((300_000,), float(rank)), torch.zeros(300_000)
    under_way = dist.all_reduce(large.clone(), async_op=True)
    operations = [
        dist.P2POp(dist.isend, large, after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    under_way.wait()
    assert bool((received == before).all())


# --- objects and lists of tensors ----------------------------------------------------------------


@case()
def objects() -> None:
    rank, world = me()
    everybody: list[Any] = [None] * world
    mine = {"rank": rank, "text": "x" * (1000 * rank), "tensor": torch.full((3,), rank)}
    dist.all_gather_object(everybody, mine)
    assert [(each["rank"], len(each["text"])) for each in everybody] == [
        (r, 1000 * r) for r in range(world)
    ]
    root = world - 1
    gathered: list[Any] | None = [None] * world if rank == root else None
    dist.gather_object((rank, None), gathered, root)
    assert gathered is None or gathered == [(r, None) for r in range(world)]
    shared: list[Any] = [rank, "a" * rank, None]
    dist.broadcast_object_list(shared, root)
    assert shared == [root, "a" * root, None]
    given: list[Any] = [None]
    dist.scatter_object_list(given, [{r} for r in range(world)] if rank == root else None, root)
    assert given == [{rank}]


@case()
def lists_of_tensors() -> None:
    rank, world = me()
    tensors = [torch.full((size,), rank + 1.0) for size in (0, 1, 5, 70_001)]
    total = sum(range(1, world + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # they will be deprecated
        dist.all_reduce_coalesced(tensors)
        assert all(bool((each == total).all()) for each in tensors)
        outputs = [[torch.zeros(2), torch.zeros(3, 3)] for _ in range(world)]
        inputs = [torch.full((2,), float(rank)), torch.full((3, 3), -float(rank))]
        dist.all_gather_coalesced(outputs, inputs)
    for peer, (first, second) in enumerate(outputs):
        assert bool((first == peer).all())
        assert bool((second == -peer).all())


@case()
def collectives_in_a_coalescing_manager() -> None:
    rank, world = me()
    gathered = [torch.zeros(size * world) for size in (1, 7)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in gathered:
            part = torch.full((output.numel() // world,), float(rank))
            dist.all_gather_single(output, part)
    manager.wait()
    for output in gathered:
        assert torch.equal(
            output, torch.arange(world * 1.0).repeat_interleave(len(output) // world)
        )
    scattered = [torch.zeros(size) for size in (1, 7)]
    with dist._coalescing_manager():
        for output in scattered:
            whole = torch.arange(world * 1.0).repeat_interleave(len(output))
            dist.reduce_scatter_single(output, whole)
    assert all(bool((output == rank * world).all()) for output in scattered)


# --- what torch builds on groups -----------------------------------------------------------------


@case()
def functional_collectives() -> None:
    rank, world = me()
    group = dist.group.WORLD
    total = sum(range(1, world + 1))
    mine = torch.full((6, 2), rank + 1.0)
    assert bool((functional.all_reduce(mine, "sum", group) == total).all())
    assert bool((functional.all_reduce(mine, "avg", group) == total / world).all())
    gathered = functional.all_gather_single(mine, 0, group)
    assert torch.equal(gathered[::6, 0], torch.arange(1.0, world + 1))
    assert functional.all_gather_single(mine, 1, group).shape == (6, 2 * world)
    scattered = functional.reduce_scatter_single(mine.repeat(world, 1), "sum", 0, group)
    assert bool((scattered == total).all())
    assert bool((functional.broadcast(mine, world - 1, group) == world).all())
    exchanged = functional.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    assert torch.equal(exchanged + 0, torch.arange(world * 1.0))
    assert bool((functional.all_reduce_coalesced([mine], "max", group)[0] == world).all())
    (each,) = functional.all_gather_single_coalesced([mine], group)
    assert torch.equal(each + 0, gathered + 0)
    parts = functional.reduce_scatter_single_coalesced([mine.repeat(world, 1)], "sum", [0], group)
    assert torch.equal(parts[0] + 0, scattered + 0)


def _train(model: nn.Module, rows: torch.Tensor, steps: int = 3) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        (model(rows + step) ** 2).mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 2))


def _rows() -> torch.Tensor:
    _, world = me()
    return torch.randn(4 * world, 10, generator=torch.Generator().manual_seed(1))


@case()
def torch_ddp() -> None:
    rank, _ = me()
    alone = _train(_model(), _rows())
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        wrapped = DistributedDataParallel(_model(), bucket_cap_mb=0.002, **options)
        together = _train(wrapped, _rows()[4 * rank : 4 * rank + 4])
        assert torch.allclose(alone, together, atol=1e-6)


@case()
def torch_ddp_with_hooks() -> None:
    rank, _ = me()
    alone = _train(_model(), _rows())
    power = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    hooks = ((None, default_hooks.allreduce_hook), (None, default_hooks.fp16_compress_hook))
    for state, hook in (*hooks, (power, powerSGD_hook.powerSGD_hook)):
        wrapped = DistributedDataParallel(_model())
        wrapped.register_comm_hook(state, hook)
        together = _train(wrapped, _rows()[4 * rank : 4 * rank + 4])
        assert torch.allclose(alone, together, atol=0.1)
        same = [torch.zeros_like(together) for _ in range(dist.get_world_size())]
        dist.all_gather(same, together)
        assert all(torch.equal(each, together) for each in same)


@case()
def meshes_and_sharded_modules() -> None:
    rank, world = me()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(4.0 * world)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert float(sharded.sum().full_tensor()) == float(whole.sum())
    alone = _train(_model(), _rows())
    model = _model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (model(_rows()[4 * rank : 4 * rank + 4] + step) ** 2).mean().backward()
        optimizer.step()
    full = torch.cat([each.full_tensor().detach().flatten() for each in model.parameters()])
    assert torch.allclose(alone, full, atol=1e-6)
