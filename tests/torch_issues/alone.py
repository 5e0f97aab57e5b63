"""Situations in which torch hangs, or dies: each has ranks of its own, and tells what they saw."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import paceline

# Only what torch waits for in vain lasts so long.
GROUP_TIMEOUT = datetime.timedelta(seconds=10)


def wrapper(name: str) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return TorchDDP if name == "torch" else paceline.DistributedDataParallel


# --- a parameter that only one rank leaves out ---------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor, with_head: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.body(inputs)
        return self.head(hidden) if with_head else hidden


def unused_on_one_rank(name: str) -> list[str]:
    """Rank 1 has a batch without objects: its head gets no gradient, in the first step."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model = wrapper(name)(Branches(), process_group=dist.new_group(timeout=GROUP_TIMEOUT))
    said = []
    for step in range(2):
        try:
            model(torch.ones(2, 3), with_head=rank == 0 or step > 0).sum().backward()
            said.append("nothing")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
            break
    store.set(f"rank {rank} is done", "")  # rank 1 lives on, as a program that caught the error
    store.wait([f"rank {other} is done" for other in range(2)], datetime.timedelta(seconds=100))
    return said


# --- a rank with fewer batches -------------------------------------------------------------------


def fewer_batches(name: str) -> list[str]:
    """Rank 1's loader is shorter by one; then all sum up a metric, in the default group."""
    group = dist.new_group(timeout=GROUP_TIMEOUT)
    model = wrapper(name)(nn.Linear(3, 2), process_group=group)
    said = []
    for _ in range(3 - dist.get_rank()):
        try:
            model(torch.ones(2, 3)).sum().backward()
            said.append("nothing")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.all_reduce(torch.ones(1))
    return said


# --- join() and a hook for buffers ---------------------------------------------------------------


def sum_up(group: Any, buffers: dict[str, torch.Tensor]) -> list[Any]:
    for buffer in buffers.values():
        dist.all_reduce(buffer, group=group)
    return []


def buffer_hook_in_join(name: str) -> list[list[float]]:
    """Rank 1 has two batches more. The hook runs after each forward."""
    group = dist.group.WORLD
    model = wrapper(name)(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model._register_buffer_comm_hook(group, sum_up, Location.POST_FORWARD)
    with model.join():
        for _ in range(2 + 2 * dist.get_rank()):
            model(torch.randn(4, 3)).sum().backward()
    return [buffer.flatten().tolist() for buffer in model.buffers()]


# --- compiled graphs and buckets -----------------------------------------------------------------


class Layers(nn.Module):
    """Six layers with 1 MB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs


def graphs(name: str, cap_mb: float, graph_bytes: int | None = None) -> int | str:
    """Return how many graphs torch.compile makes of the module."""
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = wrapper(name)(torch.compile(Layers(), backend=counter), bucket_cap_mb=cap_mb)
    if graph_bytes is not None:
        model.compiled_graph_bytes = graph_bytes
    try:
        for _ in range(2):
            model(torch.ones(4, 512)).sum().backward()
    except AssertionError as error:
        return f"{type(error).__name__}: {error}"
    return counter.frame_count


def graphs_of_bucket_sizes(name: str) -> list[int | str]:
    return [graphs(name, cap_mb) for cap_mb in (0.5, 1, 25)]


def graphs_of_graph_sizes() -> list[int | str]:
    return [graphs("paceline", 1, megabytes * 1024 * 1024) for megabytes in (0, 3, 25)]
