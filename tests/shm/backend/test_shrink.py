"""``dist.shrink_group`` on the backend ``paceline``: as torch documents it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline import DistributedDataParallel as DDP
from paceline.errors import GroupAbortedError, PeerLostError
from paceline.testing import RanksFailedError, run_ranks

ABORT = c10d.SHRINK_ABORT


def total() -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def test_the_default_group_becomes_smaller() -> None:
    """Ranks are numbered anew; other groups are destroyed; everything works, and once more."""

    def on_rank() -> None:
        rank = dist.get_rank()
        other = dist.new_group([0, 1, 2, 3])
        if rank == 1:
            return
        group = c10d.shrink_group([1])
        assert group is dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size()) == ({0: 0, 2: 1, 3: 2}[rank], 3)
        assert dist.get_backend() == "paceline"
        assert total() == 6
        with pytest.raises(ValueError, match=r"not initialized|Invalid process group"):
            dist.get_backend(other)
        gathered = [None] * 3
        dist.all_gather_object(gathered, rank)
        assert gathered == [0, 2, 3]
        again = dist.new_group([0, 1, 2])
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=again)
        assert tensor.tolist() == [3, 3]
        if rank == 3:
            return
        c10d.shrink_group([2])
        assert (dist.get_rank(), dist.get_world_size()) == ({0: 0, 2: 1}[rank], 2)
        assert total() == 3

    run_ranks(4, on_rank, backend="paceline")


def test_a_wrapper_goes_on_with_it() -> None:
    """Gradients of the ranks that are left are averaged, in shared memory."""

    def on_rank() -> None:
        torch.manual_seed(0)
        ddp = DDP(torch.nn.Linear(3, 1, bias=False))
        value = dist.get_rank() + 1.0
        ddp(torch.full((1, 3), value)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[2.0] * 3]
        if dist.get_rank() == 2:
            return
        ddp._update_process_group(c10d.shrink_group([2]))
        ddp.zero_grad()
        ddp(torch.full((1, 3), value)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5] * 3]
        assert ddp.stats().transport == "shm"

    run_ranks(3, on_rank, backend="paceline")


def test_a_subgroup_becomes_smaller() -> None:
    def on_rank() -> None:
        group = dist.new_group([0, 1, 2])
        if dist.get_rank() == 1:
            return
        shrunk = c10d.shrink_group([1], group=group)
        assert dist.get_world_size() == 3
        assert dist.get_world_size(shrunk) == 2
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=shrunk)
        assert tensor.item() == 2

    run_ranks(3, on_rank, backend="paceline")


def test_what_torch_refuses_is_refused() -> None:
    def on_rank() -> None:
        assert dist.group.WORLD._get_backend(torch.device("cpu")).supports_shrinking
        for ranks, error in (([], ValueError), ([7], ValueError), ([0, 0], ValueError),
                             ([0, 1], ValueError), ([dist.get_rank()], RuntimeError)):  # fmt: skip
            with pytest.raises(error):
                c10d.shrink_group(ranks)
        assert total() == 3

    run_ranks(2, on_rank, backend="paceline")


@pytest.mark.parametrize("flags", [c10d.SHRINK_DEFAULT, ABORT])
def test_a_rank_was_killed(tmp_path: Path, flags: int) -> None:
    """Survivors hear of it in their collective, leave the dead one out, and go on."""

    def on_rank() -> None:
        rank = dist.get_rank()
        total()
        (tmp_path / f"past-{rank}").touch()
        while len(list(tmp_path.glob("past-*"))) < 3:  # nobody is disturbed in the first sum
            time.sleep(0.005)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 or not flags:
            with pytest.raises((PeerLostError, GroupAbortedError)):
                total()
        c10d.shrink_group([1], shrink_flags=flags)
        (tmp_path / f"{rank}").write_text(f"{dist.get_rank()} of {dist.get_world_size()} {total()}")
        dist.barrier()

    with pytest.raises(RanksFailedError, match="rank 1"):
        run_ranks(3, on_rank, backend="paceline", grace_s=60.0)
    assert (tmp_path / "0").read_text() == "0 of 2 3.0"
    assert (tmp_path / "2").read_text() == "1 of 2 3.0"


def test_abort_releases_who_waits() -> None:
    """With SHRINK_ABORT a rank of this host that waits in the old group is told."""

    def on_rank() -> None:
        rank = dist.get_rank()
        if rank == 2:
            return
        if rank == 0:
            with pytest.raises((GroupAbortedError, PeerLostError)):
                dist.barrier()  # rank 1 does not come
        c10d.shrink_group([2], shrink_flags=ABORT)
        assert total() == 3

    run_ranks(3, on_rank, backend="paceline")
