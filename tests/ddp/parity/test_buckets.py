"""How gradients are cut into buckets, and that all ranks cut them alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import TorchDDP, assert_close, batch, gradients, pair, step_both
from tests.ddp.models import mlp

MIB = 1024 * 1024


def wide(depth: int) -> nn.Sequential:
    """Layers of exactly 256 KiB each."""
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(depth)))


def bucket_names(ddp: DDP) -> list[tuple[str, ...]]:
    return [bucket.parameters for bucket in ddp.stats().buckets]


def train(ddp: nn.Module, steps: int = 2, width: int = 4) -> None:
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(step, width=width)).square().mean().backward()


def test_first_bucket_is_one_mebibyte_then_the_cap() -> None:
    def on_rank() -> tuple[list[int], list[int]]:
        by_default = DDP(wide(10))
        train(by_default, width=256)
        with_cap = DDP(wide(10), bucket_cap_mb=0.5)
        train(with_cap, width=256)
        return tuple([b.bytes for b in ddp.stats().buckets] for ddp in (by_default, with_cap))

    for by_default, with_cap in run_ranks(2, on_rank):
        assert by_default == [1 * MIB, 10 * 256 * 1024 - MIB]
        assert with_cap == [MIB // 2] * 5


@pytest.mark.parametrize("cap_mb", [1e-6, 0.3, 0.5, 1, 25])
def test_rebuilt_buckets_have_torchs_sizes(cap_mb: float) -> None:
    def on_rank() -> None:
        ours, theirs = pair(wide(6), bucket_cap_mb=cap_mb)
        for step in range(3):
            step_both(ours, theirs, lambda m, step=step: m(batch(step, width=256)).mean())
        sizes = theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert ours._get_ddp_logging_data()["rebuilt_bucket_sizes"] == sizes
        assert sizes == ", ".join(str(bucket.bytes) for bucket in ours.stats().buckets)

    run_ranks(2, on_rank)


def test_listed_caps() -> None:
    """bucket_cap_mb_list sizes buckets one by one; the last entry repeats."""

    def on_rank() -> list[int]:
        ours, theirs = pair(wide(8), bucket_cap_mb_list=[0.25, 0.5, 0.75])
        for step in range(3):
            step_both(ours, theirs, lambda m, step=step: m(batch(step, width=256)).mean())
        sizes = theirs._get_ddp_logging_data()["bucket_sizes"]
        assert sorted(sizes.split(", ")) == sorted(str(b.bytes) for b in ours.stats().buckets)
        return sorted(bucket.bytes // 1024 for bucket in ours.stats().buckets)

    assert run_ranks(2, on_rank) == [[256, 512, 512, 768]] * 2


class Reversed(nn.Module):
    """Layers that run in reverse, so gradients arrive in the order of definition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.c(x)))


def test_rebuilt_once_in_the_order_of_arrival() -> None:
    def on_rank() -> list[list[tuple[str, ...]]]:
        torch.manual_seed(0)
        ddp = DDP(Reversed(), bucket_cap_mb=1e-6)
        seen = []
        for _ in range(3):
            train(ddp, steps=1)
            seen.append(bucket_names(ddp))
        return seen

    for first, second, third in run_ranks(2, on_rank):
        assert second == [("a.weight",), ("b.weight",), ("c.weight",)]
        assert third == second
        assert sorted(name for names in first for name in names) == [
            "a.weight",
            "b.weight",
            "c.weight",
        ]


class OrderByRank(nn.Module):
    """A chain whose order depends on the rank: so does the order in which gradients arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return x


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_whose_gradients_arrive_in_another_order_agree(world: int) -> None:
    def on_rank() -> list[tuple[str, ...]]:
        rank = dist.get_rank()
        orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]]
        torch.manual_seed(0)
        model = OrderByRank()
        ddp = DDP(model, bucket_cap_mb=1e-6)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step), orders[rank]).square().mean().backward()
            found = gradients(ddp)
            plain = OrderByRank()
            plain.load_state_dict(model.state_dict())
            for each in range(world):
                (plain(batch(step, each), orders[each]).square().mean() / world).backward()
            assert_close(found, gradients(plain))
        return bucket_names(ddp)

    names, *others = run_ranks(world, on_rank)
    assert len(names) == 8
    assert all(other == names for other in others)
    assert names[0][0].startswith("layers.3"), "rank 0's order counts"


def test_one_dtype_per_bucket() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Linear(4, 4, bias=False)
            self.middle = nn.Linear(4, 4, bias=False).double()
            self.last = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.single(x).double()).float())

    def on_rank() -> set[tuple[str, ...]]:
        ddp = DDP(Halves())
        train(ddp, 3)
        return {tuple(sorted(names)) for names in bucket_names(ddp)}

    expected = {("last.weight", "single.weight"), ("middle.weight",)}
    assert run_ranks(2, on_rank) == [expected] * 2


def test_find_unused_keeps_the_first_buckets() -> None:
    """As in torch: the order may change in every step."""

    def on_rank() -> None:
        options = {"find_unused_parameters": True, "bucket_cap_mb": 1e-6}
        ours, theirs = pair(mlp(4), **options)
        before = bucket_names(ours)
        for step in range(3):
            step_both(ours, theirs, lambda m, step=step: m(batch(step)).mean())
        assert bucket_names(ours) == before
        assert "has_rebuilt_buckets" not in ours._get_ddp_logging_data()
        assert not theirs._get_ddp_logging_data().get("has_rebuilt_buckets", 0)

    run_ranks(2, on_rank)


def test_torch_agrees_which_parameters_are_in_a_bucket() -> None:
    def on_rank() -> None:
        ours, theirs = pair(mlp(4, depth=5), bucket_cap_mb=1e-4)
        assert isinstance(theirs, TorchDDP)
        for step in range(3):
            step_both(ours, theirs, lambda m, step=step: m(batch(step)).mean())
        key = "rebuilt_per_bucket_param_indices"
        assert ours._get_ddp_logging_data()[key] == theirs._get_ddp_logging_data()[key]

    run_ranks(2, on_rank)
