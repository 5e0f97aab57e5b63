"""Uses of groups: functional and object collectives, messages, subgroups, pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import ScheduleInterleaved1F1B as Interleaved
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = 4
FUNCTIONAL = "_c10d_functional"


def mine(*shape: int) -> torch.Tensor:
    """Random numbers, other ones on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def functional_collectives(_: Path) -> Any:
    world = dist.group.WORLD
    size = dist.get_world_size()
    ours = mine(2 * size, 3)
    return [
        functional.all_reduce(ours, "sum", world) + 0,
        functional.all_reduce(ours, "max", world) + 0,
        functional.all_reduce(ours, "avg", world) + 0,
        functional.all_gather_tensor(ours, 1, world) + 0,
        functional.reduce_scatter_tensor(ours, "sum", 0, world) + 0,
        functional.all_to_all_single(ours, None, None, world) + 0,
        functional.broadcast(ours, 1, world) + 0,
        functional.permute_tensor(ours.flatten(), [1, 0], world) + 0,
        *(part + 0 for part in functional.all_reduce_coalesced([ours, 2 * ours], "sum", world)),
        *(t + 0 for t in functional.all_gather_into_tensor_coalesced([ours, 2 * ours], world)),
        *(
            part + 0
            for part in functional.reduce_scatter_tensor_coalesced(
                [ours, 2 * ours], "sum", [0, 0], world
            )
        ),
    ]


def functional_collectives_in_autograd(_: Path) -> Any:
    world, found = dist.group.WORLD, []
    for collective in (
        lambda x: functional.all_gather_tensor_autograd(x, 0, world),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, world),
        lambda x: functional.all_to_all_single_autograd(x, None, None, world),
    ):
        ours = mine(4, 3).requires_grad_()
        result = collective(ours)
        (result * mine(*result.shape)).sum().backward()
        found += [result.detach() + 0, ours.grad]
    return found


def functional_operators(_: Path) -> Any:
    """What the functions above do not call: in place, into given memory, messages."""
    operators = torch.ops._c10d_functional
    name, size = dist.group.WORLD.group_name, dist.get_world_size()
    other, ours = 1 - dist.get_rank(), mine(2 * size, 3)
    sent = operators.isend(ours, other, 0, name)
    arrived = operators.irecv(torch.empty_like(ours), other, 0, name)
    words, peers, tags = ["isend", "irecv"], [other, other], [1, 1]
    batch = [2 * ours, torch.empty_like(ours)]
    out = torch.empty(2 * size * size, 3)
    part = torch.empty(2, 3)
    results = [
        sent,
        arrived,
        *operators.batch_p2p_ops(words, peers, tags, batch, name),
        operators.all_reduce_(ours.clone(), "sum", name),
        *operators.all_reduce_coalesced_([ours.clone(), 2 * ours], "max", name),
        operators.broadcast_(ours.clone(), 1, name),
        operators.all_gather_into_tensor_out(ours, size, name, out=out),
        operators.reduce_scatter_tensor_out(ours, "sum", size, name, out=part),
    ]
    return [operators.wait_tensor(result) for result in results]


class Called(TorchDispatchMode):
    """Remembers the functional collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == FUNCTIONAL:
            self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def functional_operators_not_used(folder: Path) -> Any:
    """Those of torch that none of these uses runs."""
    with Called() as called:
        functional_collectives(folder)
        functional_operators(folder)
    of_torch = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return sorted(name for name in of_torch - called.names if name.startswith(f"{FUNCTIONAL}::"))


def collectives_of_nn(_: Path) -> Any:
    """``torch.distributed.nn``: collectives with gradients."""
    from torch.distributed.nn import functional as with_gradients

    ours = mine(4, 3).requires_grad_()
    result = with_gradients.all_reduce(ours * 2)
    gathered = with_gradients.all_gather(ours)
    (result.pow(2).sum() + sum(part.sin().sum() for part in gathered)).backward()
    return result, list(gathered), ours.grad


def objects(_: Path) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = {"rank": rank, "text": "x" * (1 + 50 * rank)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, ours)
    at_one: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(ours, at_one, dst=1)
    sent = [ours, [rank], None]
    dist.broadcast_object_list(sent, src=1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"to {r}" for r in range(size)], src=0)
    return gathered, at_one, sent, scattered


def objects_from_one_to_another(_: Path) -> Any:
    received: list[Any] = [None, None]
    if dist.get_rank() == 0:
        dist.send_object_list([{"a": 1}, "b"], dst=1)
    elif dist.get_rank() == 1:
        dist.recv_object_list(received, src=0)
    return received


def exchanges_in_a_batch(_: Path) -> Any:
    """Rings of two directions, several tensors, with dtypes and shapes of their own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    sent = [mine(5), mine(2, 3).to(torch.bfloat16), torch.tensor([rank])]
    received = [torch.zeros_like(tensor) for tensor in sent]
    back, came_back = mine(7), torch.zeros(7)
    operations = [dist.P2POp(dist.isend, t, following, tag=i) for i, t in enumerate(sent)]
    operations += [dist.P2POp(dist.irecv, t, previous, tag=i) for i, t in enumerate(received)]
    operations += [dist.P2POp(dist.isend, back, previous, tag=9)]
    operations += [dist.P2POp(dist.irecv, came_back, following, tag=9)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received, came_back


def messages(_: Path) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = mine(3)
    if rank == 0:
        found = [dist.recv(tensor) for _ in range(size - 1)]  # from any source
        return sorted(found)
    dist.send(tensor, 0)
    return tensor


def subgroups(_: Path) -> Any:
    group, groups = dist.new_subgroups(group_size=2)
    tensor = mine(5)
    dist.all_reduce(tensor, group=group)
    by_enumeration, _others = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    other = mine(5)
    dist.all_reduce(other, group=by_enumeration)
    found = [tensor, other, len(groups), dist.get_process_group_ranks(by_enumeration)]
    for one in (group, by_enumeration):
        dist.destroy_process_group(one)
    return found


def splits(_: Path) -> Any:
    halves = dist.split_group(split_ranks=[[0, 3], [1, 2]])
    assert halves is not None
    tensor, alone = mine(5), mine(2)
    dist.all_reduce(tensor, group=halves)
    single = dist.split_group(halves, split_ranks=[[0], [1]])
    dist.all_reduce(alone, group=single)
    pair = dist.split_group(split_ranks=[[0, 1]])
    found = [tensor, alone, dist.get_process_group_ranks(halves), halves.group_desc]
    return [
        *found,
        isinstance(pair, dist.ProcessGroup),
        dist.get_backend(halves) == dist.get_backend(),
    ]


def with_an_absent_rank(_: Path) -> Any:
    """Ranks outside of a group get None, and may go on."""
    group = dist.new_group([1, 3])
    tensor = mine(4)
    if dist.get_rank() in (1, 3):
        dist.all_reduce(tensor, group=group)
    return tensor


# --- pipelines ---------------------------------------------------------------------------------


def layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def run_pipeline(schedule_class: Any, parts: list[nn.Module], stages_of_a_rank: int) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    indices = [rank + size * i for i in range(stages_of_a_rank)]
    stages = [PipelineStage(parts[i], i, size * stages_of_a_rank, device) for i in indices]
    chosen = stages[0] if stages_of_a_rank == 1 else stages
    schedule = schedule_class(chosen, PARTS, loss_fn=loss_of)
    inputs, targets = torch.randn(8, 6), torch.randn(8, 6)
    losses: list[torch.Tensor] = []
    is_last = indices[-1] == len(parts) - 1
    arguments = (inputs,) if rank == 0 else ()
    wanted = {"target": targets, "losses": losses} if is_last else {}
    output = schedule.step(*arguments, **wanted)
    gradients = [p.grad for i in indices for p in parts[i].parameters()]
    return output, losses, gradients


def halves() -> list[nn.Module]:
    four = layers()
    return [nn.Sequential(*four[:2]), nn.Sequential(*four[2:])]


def pipelines_gpipe(_: Path) -> Any:
    return run_pipeline(ScheduleGPipe, halves(), 1)


def pipelines_1f1b(_: Path) -> Any:
    return run_pipeline(Schedule1F1B, halves(), 1)


def pipelines_interleaved(_: Path) -> Any:
    return run_pipeline(Interleaved, layers(), 2)


ON_TWO = [
    functional_collectives,
    functional_collectives_in_autograd,
    functional_operators,
    functional_operators_not_used,
    collectives_of_nn,
    objects,
    objects_from_one_to_another,
    exchanges_in_a_batch,
    messages,
    pipelines_gpipe,
    pipelines_1f1b,
    pipelines_interleaved,
]
ON_FOUR = [
    objects,
    exchanges_in_a_batch,
    messages,
    subgroups,
    splits,
    with_an_absent_rank,
]
