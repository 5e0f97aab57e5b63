"""Forked children of a rank: what they do to gradients, wrapper and group is theirs alone.

A child that writes, drops or computes gradients must not change a bit of its parent's or of a
peer's; what needs the peers raises; what does not need them works. By every way to make a child.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel
from paceline.errors import GroupClosedError
from paceline.testing import run_ranks
from tests.children import FORKS, do_in_fork, in_child, wait_for

WIDTH = 300  # gradients of some pages each

Deed = Callable[[DistributedDataParallel], None]


# --- what children do ----------------------------------------------------------------------------


def write(ddp: DistributedDataParallel) -> None:
    """Write into every gradient, and find there what was written."""
    for number, parameter in enumerate(ddp.parameters()):
        assert parameter.grad is not None
        parameter.grad.fill_(float(number))
    for number, parameter in enumerate(ddp.parameters()):
        assert parameter.grad is not None
        assert bool((parameter.grad == number).all())


def drop(ddp: DistributedDataParallel) -> None:
    """Let go of all gradients and of the buckets themselves."""
    assert ddp.reducer is not None
    ddp.zero_grad()
    for bucket in ddp.reducer.buckets:
        bucket.detach()
    ddp.__dict__.clear()
    gc.collect()


def read(ddp: DistributedDataParallel) -> None:
    """Read what the parent had, and what it has not changed since."""
    expected = next(ddp.module.buffers())
    assert torch.equal(torch.cat([p.grad.flatten() for p in ddp.parameters()]), expected)


def train_alone(ddp: DistributedDataParallel) -> None:
    """A backward of the bare module gives the gradients of one process."""
    module = ddp.module
    module.zero_grad()
    inputs = torch.full((2, WIDTH), 2.0)
    module(inputs).sum().backward()
    twin = make_model()
    twin.load_state_dict(module.state_dict(), strict=False)
    twin(inputs).sum().backward()
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def use(ddp: DistributedDataParallel) -> None:
    """What needs the peers says that they are not there."""
    with pytest.raises(GroupClosedError, match="child that was forked"):
        ddp(torch.ones(2, WIDTH))
    with pytest.raises(GroupClosedError, match="child that was forked"), ddp.join():
        pass


DEEDS: dict[str, Deed] = {
    "write": write,
    "drop": drop,
    "read": read,
    "train alone": train_alone,
    "use": use,
}


# --- in a rank -----------------------------------------------------------------------------------


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4))


def gradients(module: torch.nn.Module) -> torch.Tensor:
    found = [p.grad for p in module.parameters()]
    return torch.cat([grad.flatten().clone() for grad in found if grad is not None])


def step(ddp: DistributedDataParallel, number: int) -> torch.Tensor:
    ddp.zero_grad()
    ddp(torch.full((2, WIDTH), float(number + dist.get_rank()))).sum().backward()
    return gradients(ddp)


def expected_step(number: int, world: int) -> torch.Tensor:
    """The mean over the ranks, in one process."""
    total = torch.zeros(())
    for rank in range(world):
        model = make_model()
        model(torch.full((2, WIDTH), float(number + rank))).sum().backward()
        total = total + gradients(model) / world
    return total


def fork_and_go_on(way: str, deeds: list[str], transport: str) -> None:
    ddp = DistributedDataParallel(make_model(), transport=transport, bucket_cap_mb=0.1)
    for number, name in enumerate(deeds):
        before = step(ddp, number)
        torch.testing.assert_close(before, expected_step(number, dist.get_world_size()))
        ddp.module.register_buffer("seen", before, persistent=False)
        ddp._buffer_sync.refresh()
        dist.barrier()  # nobody is in this step any more
        if dist.get_rank() == 0:
            in_child(way, partial(DEEDS[name], ddp))
        dist.barrier()
        assert torch.equal(gradients(ddp), before), f"{name} by {way} changed gradients"
    torch.testing.assert_close(step(ddp, 9), expected_step(9, dist.get_world_size()))


@pytest.mark.parametrize("way", FORKS)
def test_what_a_child_does_is_its_own(way: str) -> None:
    deeds = [name for name in DEEDS if name != "train alone" or way != "fork from C"]
    run_ranks(2, fork_and_go_on, way, deeds, "shm")


def test_the_same_over_c10d() -> None:
    run_ranks(2, fork_and_go_on, "os.fork", list(DEEDS), "c10d")


# --- a child that trains by itself ---------------------------------------------------------------


def begin_anew(folder: str) -> None:
    """What the error suggests: a group and a wrapper of the child's own."""
    ddp = DistributedDataParallel(make_model())
    before = step(ddp, 0)

    def train() -> None:
        dist.destroy_process_group()
        method = f"file://{folder}/{os.getpid()}"
        dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
        own = DistributedDataParallel(ddp.module, transport="shm")
        torch.testing.assert_close(step(own, 5), expected_step(5, 1))
        dist.destroy_process_group()

    in_child("os.fork", train)
    assert torch.equal(gradients(ddp), before)
    torch.testing.assert_close(step(ddp, 1), expected_step(1, dist.get_world_size()))


def test_a_child_can_train_with_a_group_of_its_own(tmp_path: Path) -> None:
    run_ranks(2, begin_anew, str(tmp_path))


# --- in the middle of a backward -----------------------------------------------------------------


@contextlib.contextmanager
def forking_hook(parameter: torch.Tensor, deed: Callable[[], None]) -> Iterator[list[int]]:
    """Fork whenever this gradient is computed; gives the children's exit codes."""
    codes: list[int] = []

    def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
        codes.append(do_in_fork(deed))
        return gradient

    handle = parameter.register_hook(on_gradient)
    yield codes
    handle.remove()


def fork_in_backward() -> None:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.01, transport="shm")
    step(ddp, 0)

    def disturb() -> None:
        for parameter in ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(7.0)
        ddp.zero_grad()
        gc.collect()

    first = next(iter(ddp.module.parameters()))
    for number in range(1, 6):
        with forking_hook(first, disturb) as codes:
            found = step(ddp, number)
        assert codes == [0]
        torch.testing.assert_close(found, expected_step(number, dist.get_world_size()))


def test_a_fork_in_the_middle_of_a_backward() -> None:
    run_ranks(2, fork_in_backward)


def go_on_in_the_child() -> None:
    """The child does not end in the hook: its backward raises, and does not wait for peers."""
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
    step(ddp, 0)
    output = ddp(torch.ones(2, WIDTH)).sum()
    home, children = os.getpid(), []

    def on_gradient(gradient: torch.Tensor) -> None:
        pid = os.fork()
        if pid:
            children.append(pid)

    handle = next(iter(ddp.parameters())).register_hook(on_gradient)
    ddp.zero_grad()
    try:
        output.backward()
    except GroupClosedError as error:
        os._exit(0 if os.getpid() != home and "forked" in str(error) else 3)
    finally:
        if os.getpid() != home:
            os._exit(4)
    handle.remove()
    assert [wait_for(pid) for pid in children] == [0]


def test_a_child_that_goes_on_with_the_backward_raises() -> None:
    run_ranks(2, go_on_in_the_child)


def backward_in_the_child() -> None:
    """The forward was the parent's."""
    ddp = DistributedDataParallel(make_model())
    output = ddp(torch.ones(2, WIDTH)).sum()

    def backward() -> None:
        with pytest.raises(GroupClosedError, match="forked"):
            output.backward()

    in_child("os.fork", backward)
    output.backward()


def test_a_backward_of_a_forward_of_the_parent_raises() -> None:
    run_ranks(2, backward_in_the_child)


# --- how children end ----------------------------------------------------------------------------


def test_a_child_ends_by_itself(tmp_path: Path) -> None:
    program = Path(__file__).with_name("forks_and_exits.py")
    command = [sys.executable, str(program), str(tmp_path / "store")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "the child ended with 5, same: True\n", found.stderr


def use_group() -> None:
    group: Any = dist.distributed_c10d._get_default_group()
    under_way = dist.all_reduce(torch.ones(3), async_op=True) if dist.get_rank() == 0 else None

    def use() -> None:
        for call in (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.send(torch.ones(3), 1 - dist.get_rank()),  # the inner group's
            dist.barrier,
            group.abort,
        ):
            with pytest.raises(GroupClosedError, match="forked"):
                call()
        if under_way is not None:
            with pytest.raises(GroupClosedError, match="forked"):
                under_way.wait()
            with pytest.raises(GroupClosedError, match="forked"):
                under_way.get_future().wait()
        dist.destroy_process_group()
        gc.collect()

    in_child("os.fork", use)
    if under_way is None:
        dist.all_reduce(torch.ones(3))
    else:
        under_way.wait()
    dist.barrier()


def test_the_backend_in_a_child() -> None:
    run_ranks(2, use_group, backend="paceline")


def fork_in_a_signal() -> None:
    """A signal's handler forks while its process waits in a collective; the child returns to it."""
    home = os.getpid()
    children = []

    def on_signal(*_: object) -> None:
        pid = os.fork()
        if pid:
            children.append(pid)

    signal.signal(signal.SIGUSR1, on_signal)
    dist.barrier()
    if dist.get_rank() == 1:
        other = int(dist.distributed_c10d._get_default_store().get("waiter"))
        while "futex" not in _waits_in(other):
            time.sleep(0.01)
        os.kill(other, signal.SIGUSR1)
        dist.distributed_c10d._get_default_store().get("forked")
        dist.barrier()
        return
    # Before anybody may send the signal: a child would wait for a thread that it does not have.
    _tell_when(lambda: bool(children))
    dist.distributed_c10d._get_default_store().set("waiter", str(home))
    try:
        dist.barrier()
    except GroupClosedError as error:
        os._exit(0 if os.getpid() != home and "forked" in str(error) else 3)
    finally:
        if os.getpid() != home:
            os._exit(4)
    assert [wait_for(pid) for pid in children] == [0]


def _waits_in(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as stream:
        return stream.read()
    return ""


def _tell_when(is_met: Callable[[], bool]) -> None:
    """Another thread says it through the store: this one is in a collective meanwhile."""

    def tell() -> None:
        while not is_met():
            time.sleep(0.01)
        dist.distributed_c10d._get_default_store().set("forked", "1")

    threading.Thread(target=tell, daemon=True).start()


def test_a_signal_handler_that_forks() -> None:
    run_ranks(2, fork_in_a_signal, backend="paceline")
