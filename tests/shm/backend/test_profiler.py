"""Collectives of the backend ``paceline`` are events for torch's profilers, as gloo's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.testing import run_ranks

Event = tuple[str, Any]


def run_all() -> None:
    rank, two = dist.get_rank(), torch.ones(2)
    dist.all_reduce(torch.ones(3, 4))
    dist.broadcast(torch.ones(5), 0)
    dist.all_gather([torch.ones(2), torch.ones(2)], two)
    dist.barrier()
    work = dist.all_reduce(torch.ones(7), async_op=True)
    assert work is not None
    work.wait()
    dist.all_gather_single(torch.ones(4), two)
    dist.reduce(torch.ones(6), 0)
    dist.all_to_all_single(torch.ones(4), torch.ones(4))
    dist.reduce_scatter_single(torch.ones(2), torch.ones(4))
    dist.scatter(torch.ones(2), [two, two] if rank == 0 else None, 0)
    dist.gather(two, [torch.ones(2), torch.ones(2)] if rank == 0 else None, 0)
    dist.send(two, 1) if rank == 0 else dist.recv(two, 0)


def events(kind: str) -> list[Event]:
    make = {
        "autograd": lambda: torch.autograd.profiler.profile(record_shapes=True),
        "kineto": lambda: torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ),
    }[kind]
    with make() as profile:
        run_all()
    found: Any = profile.events() if kind == "kineto" else profile.function_events
    prefixes = ("c10d::", "gloo:", "paceline:")
    seen = [event for event in found if event.name.startswith(prefixes)]
    return [(event.name, event.input_shapes) for event in seen]


@pytest.mark.parametrize("kind", ["autograd", "kineto"])
def test_events_are_those_of_gloo(kind: str) -> None:
    """The same calls, with the shapes of their tensors; and one event for each until it is done."""
    ours, theirs = (run_ranks(2, events, kind, backend=name)[0] for name in ("paceline", "gloo"))
    calls = [name for name, _ in ours if name.startswith("c10d::")]
    assert calls == [name for name, _ in theirs if name.startswith("c10d::")]
    shapes = {name: shapes for name, shapes in ours if name.startswith("c10d::")}
    assert shapes["c10d::broadcast_"] == [[5]]
    assert shapes["c10d::reduce_"] == [[6]]
    assert shapes["c10d::_reduce_scatter_base_"] == [[2], [4]]
    done = [name for name, _ in ours if name.startswith("paceline:")]
    assert len(done) == len(calls) - 1  # send is the inner group's
    assert done.count("paceline:all_reduce") == 2


def stop_at_once(times: int) -> int:
    """A profiler that stops right after a wait must not meet an event in its middle."""
    seen = 0
    for _ in range(times):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
            assert work is not None
            work.wait()
        seen += sum(event.name == "paceline:all_reduce" for event in profile.events())
    return seen


def test_a_profiler_may_stop_at_once() -> None:
    assert run_ranks(2, stop_at_once, 20, backend="paceline") == [20, 20]
