"""Ranks on two test hosts: shared memory inside of each, gloo over the link between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.shm.collectives.cross_host import CLOSE_TIMEOUT_S
from paceline.testing.hosts import Hosts, hosts_unavailable_reason, run_on_hosts, test_hosts
from paceline.torch_private.groups import group_timeout

REASON = hosts_unavailable_reason()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(240),
]
NUMEL = 1_500_001  # no number of ranks divides it


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with test_hosts(2) as found:
        yield found


def train(transport: str, steps: int = 4) -> tuple[str, list[torch.Tensor]]:
    """Whole numbers as inputs and weights: sums are exact in any order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    ddp = DDP(model, transport=transport, bucket_cap_mb=0.2)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.randint(-3, 4, (4, 32)).float()).sum().backward()
    assert len(ddp.stats().buckets) > 1
    return ddp.stats().transport, [parameter.grad.clone() for parameter in ddp.parameters()]


def both() -> tuple[str, bool, list[torch.Tensor]]:
    name, shared = train("shm")
    _, plain = train("c10d")
    return name, all(torch.equal(a, b) for a, b in zip(shared, plain, strict=True)), shared


@pytest.mark.parametrize("ranks", [(2, 2), (3, 1)], ids=str)
def test_gradients_are_those_of_gloo(hosts: Hosts, ranks: Sequence[int]) -> None:
    results = run_on_hosts(hosts, ranks, both, timeout_s=120)
    for name, same, gradients in results:
        assert name == "shm+c10d:gloo"
        assert same
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0][2], strict=True))


def sums() -> list[bool]:
    """All-reduce over the backend, beside gloo's, in many sizes and dtypes; some at once."""
    gloo = dist.new_group(backend="gloo")
    right = []
    for numel, dtype in (
        (0, torch.float32),
        (3, torch.int64),
        (NUMEL, torch.float32),
        (9_000_000, torch.float64),
        (1000, torch.bfloat16),
    ):
        mine = (torch.arange(numel) % 13 + dist.get_rank()).to(dtype)
        other = mine.clone()
        dist.all_reduce(mine)
        dist.all_reduce(other, group=gloo)
        right.append(torch.equal(mine, other))
    tensors = [torch.full((50_000,), float(i + dist.get_rank())) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    total = sum(range(dist.get_world_size()))
    right += [bool((t == 4 * i + total).all()) for i, t in enumerate(tensors)]
    wide = torch.arange(12.0).view(3, 4).t()
    dist.all_reduce(wide)
    right.append(torch.equal(wide, 4 * torch.arange(12.0).view(3, 4).t()))
    largest = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # the inner group's
    right.append(largest.item() == 3.0)
    objects: list[int | None] = [None] * 4
    dist.all_gather_object(objects, dist.get_rank())
    right.append(objects == [0, 1, 2, 3])
    return right


def test_the_backend_sums_over_hosts(hosts: Hosts) -> None:
    for right in run_on_hosts(hosts, 2, sums, backend="paceline", timeout_s=120):
        assert all(right), right


def one_sum(numel: int) -> float:
    value = torch.ones(numel)
    dist.all_reduce(value)
    return float(value[-1])


def test_each_rank_sends_its_slice_only(hosts: Hosts) -> None:
    """In a flat ring of n ranks each sends 2 (n - 1) / n tensors; here 1 / local_world of one."""
    numel, ranks, local_world = 4_000_000, 4, 2
    tensor_bytes = 4 * numel
    crossed = {}
    for backend in ("gloo", "paceline"):
        before = hosts.link_bytes()
        assert run_on_hosts(hosts, local_world, one_sum, numel, backend=backend) == [4.0] * 4
        crossed[backend] = hosts.link_bytes() - before
    sent_in_a_flat_ring = 2 * (ranks - 1) / ranks * tensor_bytes
    assert crossed["paceline"] / ranks <= sent_in_a_flat_ring / local_world
    # A leader group of two hosts is a ring of two: each end sends its slice once.
    assert crossed["paceline"] / ranks <= 1.03 * tensor_bytes / local_world
    assert crossed["paceline"] <= 0.7 * crossed["gloo"]


def timed_sums(numel: int) -> dict[str, float]:
    """The median time of a sum over gloo and over paceline, in turns."""
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "paceline")}
    value = torch.ones(numel)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(5):
        for name, group in groups.items():
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(value, group=group)
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


@pytest.mark.alone
def test_a_slow_link_is_used_less() -> None:
    """Two thirds of the bytes that gloo's ring sends over it, so two thirds of the time."""
    with test_hosts(2, rate="100mbit") as slow:
        found = run_on_hosts(slow, 2, timed_sums, 500_000, timeout_s=120)[0]
    assert found["paceline"] < 0.85 * found["gloo"]


def hoard(transport: str, steps: int = 9) -> list[torch.Tensor]:
    """Keep every step's gradients on rank 1 only: its arena is full long before the others'."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(4000, 4000, bias=False), transport=transport)
    kept = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(torch.full((1, 4000), float(step + dist.get_rank()))).sum().backward()
        (weight,) = ddp.parameters()
        if dist.get_rank() == 1:
            kept.append(weight.grad)
    assert all(bool((g == s + 1.5).all()) for s, g in enumerate(kept))
    return [weight.grad[:2, :2].clone()]


@pytest.mark.slow
def test_a_full_arena_on_one_rank_is_slower_not_wrong(hosts: Hosts) -> None:
    for found in run_on_hosts(hosts, 2, hoard, "shm", timeout_s=120):
        assert bool((found[0] == 8 + 1.5).all())


def lane_timeouts() -> tuple[float, float, float]:
    """Of the leader group of a wrapper, and of the backend's before and after it is changed."""
    group = dist.new_group(timeout=timedelta(seconds=70))
    ddp = DDP(nn.Linear(3, 2), process_group=group, transport="shm")
    leaders = ddp._transport.resolve()._reducer._group._leader_group
    own = dist.new_group(backend="paceline", timeout=timedelta(seconds=90))
    found = [
        group_timeout(one).total_seconds()
        for one in (leaders, own._operations._group._leader_group)
    ]
    own.set_timeout(timedelta(seconds=110))
    return *found, group_timeout(own._operations._group._leader_group).total_seconds()


def test_lanes_have_the_time_out_of_their_group(hosts: Hosts) -> None:
    assert run_on_hosts(hosts, 2, lane_timeouts) == [(70.0, 90.0, 110.0)] * 4


def leave_while_the_other_host_stays_away() -> float:
    """Host 0 begins a sum that host 1 never joins, and leaves the group."""
    group = dist.new_group(backend="paceline")
    took_s = 0.0
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(1000), group=group, async_op=True).get_future()
        time.sleep(0.5)  # until its leader waits for the other host
        began_s = time.monotonic()
        group.shutdown()
        took_s = time.monotonic() - began_s
    dist.barrier()
    return took_s


@pytest.mark.alone
def test_leaving_does_not_wait_for_another_host(hosts: Hosts) -> None:
    """The group's time-out is much longer than this."""
    for took_s in run_on_hosts(hosts, 2, leave_while_the_other_host_stays_away):
        assert took_s < 2 * CLOSE_TIMEOUT_S + 5
