"""What shards cannot be combined with is an error that says so, and nothing hangs."""

from __future__ import annotations

import contextlib
import copy
import functools
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
    step(DDP(small(), shards=Shards(4, deterministic=False)))
    torch.use_deterministic_algorithms(True)
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


def synced() -> Any:
    torch.manual_seed(0)
    first, second = paceline.nn.SyncBatchNorm(4), paceline.nn.SyncBatchNorm(3)
    return DDP(nn.Sequential(first, nn.Linear(4, 3), second), shards=3)  # rank 1 owns two


def run_all(ddp: Any, function: Any = None) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(rows(ddp).shape, generator=generator)
    ddp.run_shards(batch, function or (lambda micro: ddp(micro).square().sum().backward()))


@check
def a_loop_over_shards_that_need_each_other() -> None:
    ddp = synced()
    with pytest.raises(ConfigurationError, match=r"ddp.run_shards\(batch, function\), which runs"):
        step(ddp)
    ddp.eval()
    step(ddp)
    ddp.train()
    run_all(ddp)
    with torch.no_grad():
        ddp(torch.ones(2, 4))  # an evaluation, over the ranks
    assert ddp.shard_round == 2


@check
def shards_in_turns_with_hooks_on_gradients() -> None:
    ddp = synced()
    handles = [p.register_post_accumulate_grad_hook(lambda _: None) for p in ddp.parameters()]
    with pytest.raises(ConfigurationError, match="hooks on parameters' gradients and a SyncBatch"):
        run_all(ddp)
    for handle in handles:
        handle.remove()
    run_all(ddp)


@check
def shards_in_turns_that_are_weighted() -> None:
    ddp = synced()

    def weigh(micro: torch.Tensor) -> None:
        with ddp.weighted(2):
            ddp(micro).sum().backward()

    with pytest.raises(ConfigurationError, match=r"weighted\(n\) and a SyncBatchNorm over"):
        run_all(ddp, weigh)
    run_all(ddp)


@check
def an_exception_in_one_turn_is_told_to_all_at_once() -> None:
    ddp = synced()
    for place in ("before", "between", "after"):
        calls = []

        def fail(micro: torch.Tensor, place: str = place, calls: list[int] = calls) -> None:
            calls.append(1)
            fails = dist.get_rank() == 1 and len(calls) == 2
            if fails and place == "before":
                raise KeyError("mine")
            loss = ddp(micro).square().sum()
            if fails and place == "between":
                raise KeyError("mine")
            loss.backward()
            if fails:
                raise KeyError("mine")

        expected = KeyError if dist.get_rank() == 1 else PeerFailedError
        with pytest.raises(expected, match=r"mine|Rank 1 could not run its shards to their end"):
            run_all(ddp, fail)
        assert all(p.grad is None for p in ddp.parameters())
    run_all(ddp)
    assert ddp.shard_round == 1


@check
def shards_of_one_rank_that_run_other_layers() -> None:
    ddp = synced()

    def skip(micro: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            ddp.module[0].eval()
        try:
            ddp(micro).square().sum().backward()
        finally:
            ddp.module[0].train()

    with pytest.raises(ConfigurationError, match=r"is at the forward of [02], with .+ elsewhere"):
        run_all(ddp, skip)
    run_all(ddp)


@check
def a_shard_in_turns_without_a_backward() -> None:
    ddp = synced()

    def forget(micro: torch.Tensor) -> None:
        ddp(micro)

    def repeat(micro: torch.Tensor) -> None:
        ddp(micro)
        ddp(micro).sum().backward()

    with pytest.raises(ConfigurationError, match=r"shard [01]: it has brought no gradient"):
        run_all(ddp, forget)
    with pytest.raises(ConfigurationError, match="has run 2 forwards with gradients"):
        run_all(ddp, repeat)
    run_all(ddp)


@check
def what_a_function_returns() -> None:
    ddp, plain = synced(), DDP(small(), shards=3)

    def loss_of(wrapper: Any, micro: torch.Tensor) -> tuple[int, bool, float]:
        assert torch.is_grad_enabled()
        loss = wrapper(micro).square().sum()
        loss.backward()
        return torch.get_num_threads(), torch.is_autocast_enabled("cpu"), loss.item()

    for wrapper in (ddp, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found = wrapper.run_shards(rows(wrapper), functools.partial(loss_of, wrapper))
        assert len(found) == len(wrapper.shard_shares.owned)
        assert {each[:2] for each in found} == {(1, True)}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(WORLD)


@pytest.mark.parametrize("name", check.names)
def test_check(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
