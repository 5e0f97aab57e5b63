"""What shards cannot be combined with is an error that says so, and nothing hangs."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.config import Shards
from paceline.errors import (
    ArgumentTypeError,
    ConfigurationError,
    HookAlreadyRegisteredError,
    ModelMismatchError,
    NonFiniteGradientError,
    PeerFailedError,
    UnusedParametersError,
)
from paceline.torch_private.modules import TorchSyncBatchNorm
from tests.ddp.checks import Checks, Outcomes, assert_passed
from tests.ddp.models import Branches

check = Checks()
WORLD = 2


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def rows(ddp: Any) -> torch.Tensor:
    return torch.ones(2 * len(ddp.shard_shares.owned), 4)


def step(ddp: Any, batch: torch.Tensor | None = None) -> None:
    for micro in ddp.shards(rows(ddp) if batch is None else batch):
        ddp(micro).sum().backward()


@check.each(
    {"static_graph": True},
    {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    {"forward_sync_buffers": True},
    {"broadcast_buffers": True},
    {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
    {
        "delay_all_reduce_named_params": [("weight", torch.nn.Parameter(torch.ones(2, 4)))],
        "param_to_hook_all_reduce": torch.nn.Parameter(torch.ones(1)),
    },
)
def arguments(given: dict[str, Any]) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    name = next(iter(given))
    with pytest.raises(ConfigurationError, match=f"{name} and shards exclude each other: .+"):
        DDP(small(), shards=4, **given)


@check.each(
    (1, "2 ranks cannot share 1 shards"),
    (0, "shards=0 is no number of shards"),
    ("8", "shards is a number or paceline.Shards, not '8'"),
    (True, "shards is a number"),
)
def numbers(case: tuple[Any, str]) -> None:
    with pytest.raises((ConfigurationError, ArgumentTypeError), match=re.escape(case[1])):
        DDP(small(), shards=case[0])


@check
def modules() -> None:
    norm = nn.Sequential(nn.Linear(4, 4), paceline.nn.SyncBatchNorm(4))
    norm[1].process_group = dist.group.WORLD
    with pytest.raises(ConfigurationError, match="1 is a SyncBatchNorm with a process_group"):
        DDP(norm, shards=4)
    with pytest.raises(ConfigurationError, match="1 is torch's SyncBatchNorm, which knows no"):
        DDP(nn.Sequential(nn.Linear(4, 4), TorchSyncBatchNorm(4)), shards=4)
    with pytest.raises(ConfigurationError, match="0 is a wrapper inside"):
        DDP(nn.Sequential(DDP(small())), shards=4)


@check
def methods() -> None:
    ddp = DDP(small(), shards=4)
    with pytest.raises(ConfigurationError, match=r"no_sync\(\) and shards"), ddp.no_sync():
        pass
    with pytest.raises(ConfigurationError, match=r"join\(\) and shards"):
        ddp.join()
    with pytest.raises(ConfigurationError, match="A communication hook and shards"):
        ddp.register_comm_hook(paceline.hooks.QuantizedState(), paceline.hooks.quantized_hook)
    with pytest.raises(ConfigurationError, match="A communication hook and shards"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    ddp.register_comm_hook(None, paceline.hooks.bf16_compress_hook)
    with pytest.raises(HookAlreadyRegisteredError, match=r"are cast to torch\.bfloat16 already"):
        ddp.register_comm_hook(None, paceline.hooks.fp16_compress_hook)
    with pytest.raises(ConfigurationError, match="static_graph and shards"):
        ddp._set_static_graph()
    with pytest.raises(ConfigurationError, match=r"_register_buffer_comm_hook\(\) and shards"):
        ddp._register_buffer_comm_hook(None, lambda state, buffers: None)
    with pytest.raises(ConfigurationError, match="require_manual_backward_finalization and shards"):
        ddp.require_manual_backward_finalization = True
    with pytest.raises(ConfigurationError, match=r"inside of `for micro in ddp.shards\(batch\):`"):
        ddp(torch.ones(2, 4))
    with torch.no_grad():
        ddp(torch.ones(2, 4))
    with pytest.raises(ConfigurationError, match="needs a wrapper with shards"):
        next(DDP(small()).shards(torch.ones(2, 4)))
    step(ddp)


@check
def batches() -> None:
    ddp = DDP(small(), shards=4)
    with pytest.raises(ConfigurationError, match=r"the same multiple of 2, not \[3\]"):
        next(ddp.shards(torch.ones(3, 4)))
    with pytest.raises(ConfigurationError, match="multiple of 2"):
        next(ddp.shards((torch.ones(4, 4), torch.ones(2, 4))))
    step(ddp)


@check
def threads() -> None:
    ddp = DDP(small(), shards=4)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigurationError, match="torch uses 2 threads, but its shards are"):
            next(ddp.shards(rows(ddp)))
    finally:
        torch.set_num_threads(1)
    with pytest.warns(UserWarning, match="torch used 1 threads and uses 2 from now on"):
        DDP(small(), shards=Shards(4, threads=2))
    torch.set_num_threads(1)


@check
def deterministic_algorithms_that_are_switched_off() -> None:
    ddp = DDP(small(), shards=4)
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigurationError, match="has been switched off"):
        next(ddp.shards(rows(ddp)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(ConfigurationError, match="or only warns"):
        next(ddp.shards(rows(ddp)))
    step(DDP(small(), shards=Shards(4, deterministic=False)))
    DDP(small(), shards=4)
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    step(ddp)


@check
def settings_differ() -> None:
    with pytest.raises(ModelMismatchError, match="shards"):
        DDP(small(), shards=Shards(4, seed=dist.get_rank()))


@check
def an_operation_that_is_not_deterministic_is_named() -> None:
    ddp = DDP(small(), shards=4)
    for micro in ddp.shards(rows(ddp)):
        ddp(micro).sum().backward()
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            torch.empty(2).put_(torch.tensor([0]), torch.ones(1))


@check
def a_shard_that_is_not_finite_is_named() -> None:
    ddp = DDP(small(), shards=4, nonfinite="raise")
    batch = rows(ddp)
    if dist.get_rank() == 0:
        batch[0] = torch.nan  # shard 0
    with pytest.raises(NonFiniteGradientError, match="shard 0") as found:
        step(ddp, batch)
    assert found.value.rank == 0
    step(ddp)


@check
def a_gradient_that_is_missing_in_one_shard() -> None:
    ddp = DDP(Branches("ab"), shards=4)

    def without_b_in_shard_2() -> None:
        for shard, micro in zip(ddp.shard_shares.owned, ddp.shards(rows(ddp)), strict=True):
            ddp(micro, "a" if shard == 2 else "ab").sum().backward()

    with pytest.raises(UnusedParametersError, match="shard 2"):
        without_b_in_shard_2()
    for micro in ddp.shards(rows(ddp)):
        ddp(micro, "ab").sum().backward()


@check
def an_exception_in_one_shard_is_told_to_all() -> None:
    ddp = DDP(small(), shards=3)  # rank 1 owns two

    def fail_in_the_first() -> None:
        for micro in ddp.shards(rows(ddp)):
            ddp(micro).sum().backward()
            raise KeyError("mine")

    if dist.get_rank() == 1:
        with pytest.raises(KeyError, match="mine"):
            fail_in_the_first()
    with pytest.raises(PeerFailedError, match="its loop over shards 1 to 2 did not run to its end"):
        step(ddp)
    step(ddp)
    assert ddp.shard_round == 1


@check
def some_weighted() -> None:
    ddp = DDP(small(), shards=4)

    def weigh_the_first() -> None:
        for number, micro in enumerate(ddp.shards(rows(ddp))):
            with ddp.weighted(2) if not number else contextlib.nullcontext():
                ddp(micro).sum().backward()

    with pytest.raises(ConfigurationError, match="some shards of a round are inside"):
        weigh_the_first()
    with pytest.raises(PeerFailedError):
        step(ddp)
    with pytest.raises(ConfigurationError, match="take whole numbers"), ddp.weighted(0.5):
        step(ddp)


@check
def nothing_comes_of_a_weight_of_zero() -> None:
    """NaN in a shard that counts nothing, the last of its rank or not."""
    for bad in range(4):
        ddp = DDP(small(), shards=4, nonfinite="raise")
        owned = ddp.shard_shares.owned
        for shard, micro in zip(owned, ddp.shards(rows(ddp)), strict=True):
            with ddp.weighted(int(shard != bad)):
                ddp(micro * (torch.nan if shard == bad else 1.0)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in ddp.parameters())


class MomentumEncoder(nn.Module):
    """Moves a frozen copy of its layer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 2)
        self.key = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return self.query(x) + self.key(x)


class Renormalised(nn.Module):
    """``max_norm`` writes to the weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, max_norm=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x[:, 0].long())


@check.each((MomentumEncoder, "key.weight, key.bias"), (Renormalised, "table.weight"))
def a_forward_that_changes_parameters(case: tuple[Any, str]) -> None:
    torch.manual_seed(0)
    ddp = DDP(case[0](), shards=4)
    with pytest.raises(ConfigurationError, match=f"a forward of this round has changed {case[1]}"):
        step(ddp)


@check
def copies() -> None:
    """A copy of a wrapper has a loop of its own."""
    ddp = DDP(small(), shards=4)
    step(ddp)
    other = copy.deepcopy(ddp)
    step(other)
    for p, q in zip(ddp.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(WORLD)


@pytest.mark.parametrize("name", check.names)
def test_check(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
