"""Cases that every backend must pass: each is a function of all ranks of the default group.

They check by themselves, so that what they share with gloo is the same lines. Called by
``test_cases.py``, many in one set of processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.shm.contract import reference
from tests.shm.contract.steps import REDUCING, STEPS, Call, Step, check

CASES: dict[str, Callable[[], None]] = {}
FEWEST: dict[str, int] = {}
"""How many ranks a case needs."""


def case(ranks: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = function
        FEWEST[function.__name__] = ranks
        return function

    return register


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def is_ordered() -> bool:
    """Whether sums run in rank order: paceline's, while all ranks are on one host."""
    group = dist.group.WORLD
    return dist.get_backend() == "paceline" and group._operations is not None and _is_one_host()


def _is_one_host() -> bool:
    return type(dist.group.WORLD._operations).__name__ == "HostOperations"


def perform(step: Step, group: Any = None) -> None:
    call = Call(step, group or dist.group.WORLD)
    work, found = call.run()
    if work is not None:
        work.wait()
    check(call, found, is_ordered())


# --- arithmetic ----------------------------------------------------------------------------------


@case()
def every_dtype_and_operation() -> None:
    for kind in REDUCING:
        for dtype in reference.DTYPES:
            for seed, op in enumerate(reference.ops_of(dtype)):
                perform(Step(kind, 1003, dtype, op, root=seed, seed=seed))


@case()
def every_collective_moves_every_dtype() -> None:
    for kind in STEPS:
        for dtype in set(reference.DTYPES) - set(reference.COMPLEX if kind == "gather" else ()):
            perform(Step(kind, 77, dtype, root=1, is_async=True))


@case()
def nothing_at_all() -> None:
    for kind in STEPS:
        for is_async in (False, True):
            perform(Step(kind, 0, is_async=is_async))


@case()
def sizes_that_nothing_divides() -> None:
    for size in (1, 2, 3, 5, 4095, 4097, 262_147, 700_001):
        for kind in ("all_reduce", "broadcast", "reduce_scatter_single", "all_to_all_single"):
            perform(Step(kind, size, "float32", seed=size))


@case()
def refused_operations_raise_and_the_group_goes_on() -> None:
    """Among them some that would be wrong on numbers that are two."""
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.BXOR):
        for dtype in (torch.complex64, torch.complex128):
            options = dist.AllreduceOptions()
            options.reduceOp = op
            with pytest.raises(RuntimeError):
                dist.group.WORLD.allreduce([torch.ones(4, dtype=dtype)], options).wait()
    for op, dtype in ((dist.ReduceOp.BAND, torch.float32), (dist.ReduceOp.AVG, torch.int32)):
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(4, dtype=dtype), op)
    perform(Step("all_reduce", 5))


@case(2)
def wrong_tensors_raise_and_the_group_goes_on() -> None:
    _, world = me()
    with pytest.raises(RuntimeError):
        dist.all_gather([torch.zeros(3)] * (world - 1), torch.zeros(3))
    with pytest.raises(RuntimeError):
        dist.all_gather([torch.zeros(3)] * world, torch.zeros(4))
    with pytest.raises(RuntimeError):
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [5] * world, [1] * world)
    with pytest.raises(RuntimeError):
        dist.reduce_scatter(torch.zeros(3), [torch.zeros(4)] * world)
    perform(Step("all_reduce", 5))


@case()
def sparse_tensors_are_summed() -> None:
    rank, world = me()
    tensor = torch.sparse_coo_tensor([[rank]], [1.0], (world,), check_invariants=True)
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [1.0] * world


@case()
def dense_parameters_that_are_not_contiguous() -> None:
    """Weights in channels_last, as torch's DDP broadcasts them."""
    rank, world = me()
    values = torch.arange(48.0).view(2, 3, 2, 4)
    weight = torch.nn.Parameter((values + rank).contiguous(memory_format=torch.channels_last))
    dist.broadcast(weight, 0)
    assert torch.equal(weight, values)
    dist.all_reduce(weight)
    assert torch.equal(weight, values * world)
    assert weight.is_leaf
    assert weight.is_contiguous(memory_format=torch.channels_last)


# --- works and futures ---------------------------------------------------------------------------


@case()
def a_future_has_the_tensors() -> None:
    _, world = me()
    for size in (3, 300_000):
        work = dist.all_reduce(torch.ones(size), async_op=True)
        future = work.get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        assert float(doubled.wait().sum()) == 2 * world * size
        assert future.done()
        assert [float(each.mean()) for each in future.wait()] == [world]
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None


@case()
def every_callback_runs_once() -> None:
    heard: list[int] = []
    works = [dist.all_reduce(torch.ones(1 + 97 * i), async_op=True) for i in range(100)]
    futures = []
    for number, work in enumerate(works):
        future = work.get_future()
        future.add_done_callback(lambda _, number=number: heard.append(number))
        futures.append(future)
    torch.futures.wait_all(futures)
    _wait_until(lambda: len(heard) == len(works))
    assert sorted(heard) == list(range(100))


def _wait_until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.001)


@case()
def a_callback_may_begin_another_collective_and_wait() -> None:
    """As PowerSGD does."""
    _, world = me()

    def again(done: torch.futures.Future[Any]) -> torch.Tensor:
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    work = dist.all_reduce(torch.ones(200_000), async_op=True)
    assert float(work.get_future().then(again).wait()[-1]) == world * world


@case()
def results_are_there_when_it_is_completed() -> None:
    """Nobody waits: asked only."""
    rank, world = me()
    for whole in (torch.ones(50_000), torch.ones(2, 25_000).t(), torch.ones(3)):
        work = dist.all_reduce(whole, async_op=True)
        _wait_until(work.is_completed)
        assert bool((whole == world).all())
        work.wait()
    perform(Step("barrier"))
    del rank


@case()
def waiting_again_changes_nothing() -> None:
    for tensor in (torch.ones(5), torch.ones(2, 4).t()):
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        work.wait()
        tensor.fill_(-1)
        work.wait()
        future.wait()
        assert bool((tensor == -1).all())


@case(2)
def a_wait_can_be_given_up_and_repeated() -> None:
    rank, world = me()
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(1000)
    if rank == world - 1:
        store.wait(["contract/gave_up"])
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        assert not work.is_completed()
        with pytest.raises(RuntimeError):
            work.wait(timedelta(milliseconds=50))
        store.set("contract/gave_up", "")
    work.wait()
    assert bool((tensor == world).all())
    dist.barrier()
    store.delete_key("contract/gave_up")


@case()
def hundreds_in_flight() -> None:
    steps = [
        Step(kind, (seed * 37) % 2000, dtype, seed=seed, root=seed, is_async=True)
        for seed, kind, dtype in (
            (seed, ("all_reduce", "broadcast", "all_gather")[seed % 3], reference.DTYPES[seed % 8])
            for seed in range(400)
        )
    ]
    calls = [Call(step, dist.group.WORLD) for step in steps]
    started = [call.run() for call in calls]
    for work, _ in reversed(started):
        work.wait()
    for call, (_, found) in zip(calls, started, strict=True):
        check(call, found, is_ordered())


@case()
def tensors_live_as_long_as_they_are_needed() -> None:
    """Nobody holds on to the tensors or to the work."""
    _, world = me()
    for number in range(50):
        dist.all_reduce(torch.full((10_000,), number), async_op=True)
    last = torch.ones(3)
    dist.all_reduce(last)
    assert bool((last == world).all())


# --- groups --------------------------------------------------------------------------------------


@case()
def several_groups_from_several_threads() -> None:
    groups = [dist.new_group() for _ in range(3)]
    troubles: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for seed in range(15):
                kind = ("all_reduce", "all_gather", "broadcast", "reduce_scatter")[seed % 4]
                step = Step(kind, 1000 * number + seed, seed=seed, is_async=seed % 2 == 0)
                perform(step, groups[number])
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    if troubles:
        raise troubles[0]


@case(2)
def sub_groups_at_the_same_time() -> None:
    rank, world = me()
    members = [list(range(world)), [0, 1], [world - 1, 0], list(range(1, world))]
    groups = [(ranks, dist.new_group(ranks)) for ranks in members]
    started = []
    for number in range(20):
        for ranks, group in groups:
            if rank in ranks:
                tensor = torch.full((100 * number,), rank + 1.0)
                work = dist.all_reduce(tensor, group=group, async_op=True)
                started.append((work, tensor, sum(ranks) + len(ranks)))
    for work, tensor, total in started:
        work.wait()
        assert bool((tensor == total).all())
    for ranks, group in groups:
        if rank in ranks:
            dist.destroy_process_group(group)


@case(2)
def ranks_of_a_group_may_be_in_any_order() -> None:
    """A group's ranks are sorted, or not: what is gathered stands where c10d says."""
    rank, world = me()
    group = dist.new_group(list(reversed(range(world))))
    outputs = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(outputs, torch.tensor([float(rank)]), group=group)
    assert [int(each) for each in outputs] == dist.get_process_group_ranks(group)
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, 1, group=group)
    assert int(tensor) == 1
    dist.destroy_process_group(group)


@case()
def groups_come_and_go() -> None:
    for _ in range(3):
        group = dist.new_group()
        perform(Step("all_reduce", 1000), group)
        dist.destroy_process_group(group)


# --- barriers ------------------------------------------------------------------------------------


@case(2)
def barriers_wait_for_everybody() -> None:
    rank, _ = me()
    barriers: list[Callable[[], Any]] = [
        dist.barrier,
        lambda: dist.barrier(async_op=True).wait(),
        lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=30)),
        lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=30), True),
    ]
    for barrier in barriers:
        dist.barrier()
        if rank == 0:
            time.sleep(0.05)
        left_or_came = time.monotonic()
        barrier()
        if rank != 0:
            left_or_came = time.monotonic()
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, left_or_came)
        assert min(times[1:]) >= times[0]
