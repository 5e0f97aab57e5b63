"""What a hook gives back is checked on every rank, by name, and not waited for without end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import HookResultError
from paceline.testing import run_ranks

TIMEOUT_S = 4.0


def completed(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


# What rank 1's hook makes of a bucket, and what the error says about it.
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "int32": (lambda flat: completed(flat.to(torch.int32)), "torch.int32 instead of torch.float32"),
    "bool": (lambda flat: completed(flat > 0), "torch.bool instead of"),
    "complex": (lambda flat: completed(flat.to(torch.complex64)), "torch.complex64 instead of"),
    "too short": (lambda flat: completed(flat[1:]), "5 elements instead of 6"),
    "no data": (lambda flat: completed(flat.to("meta")), "a tensor on meta instead of cpu"),
    "sparse": (lambda flat: completed(flat.to_sparse()), "layout torch.sparse_coo"),
    "two tensors": (lambda flat: completed([flat, flat]), "list of 2, not a tensor"),
    "None": (lambda flat: completed(None), "NoneType, not a tensor"),
    "a number": (lambda flat: completed(3.0), "float, not a tensor"),
    "no future": (lambda flat: flat, "returned Tensor instead of a torch.futures.Future"),
    "nothing": (lambda flat: None, "returned NoneType instead of a torch.futures.Future"),
}


def run_wrong(kinds: list[str]) -> dict[str, tuple[str, bool]]:
    """Return the error of each kind, and whether the wrapper could be used afterwards."""
    found = {}
    for kind in kinds:
        ddp = DDP(nn.Linear(2, 2))
        is_wrong = [dist.get_rank() == 1]

        def my_hook(state: Any, bucket: Any, kind: str = kind, wrong: Any = is_wrong) -> Any:
            flat = bucket.buffer()
            return WRONG[kind][0](flat) if wrong[0] else completed(flat)

        ddp.register_comm_hook(None, my_hook)
        try:
            ddp(torch.ones(1, 2)).sum().backward()
            text = "no error"
        except HookResultError as error:
            text = str(error)
        is_wrong[0] = False
        ddp(torch.ones(1, 2)).sum().backward()
        found[kind] = text, ddp.module.weight.grad is not None
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[str, bool]]]:
    return run_ranks(2, run_wrong, list(WRONG))


@pytest.mark.parametrize("kind", WRONG)
def test_refused_on_every_rank_by_name(kind: str, results: list[Any]) -> None:
    for on_rank in results:
        text, goes_on = on_rank[kind]
        assert WRONG[kind][1] in text
        assert "my_hook" in text
        assert "rank 1" in text
        assert goes_on


def test_other_precisions_are_taken() -> None:
    """As in torch, which copies them."""

    def on_rank() -> list[float]:
        found = []
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            ddp = DDP(nn.Linear(2, 2))
            ddp.register_comm_hook(
                None, lambda state, bucket, dtype=dtype: completed(bucket.buffer().to(dtype))
            )
            ddp(torch.ones(1, 2)).sum().backward()
            found.append(ddp.module.weight.grad.sum().item())
        return found

    assert run_ranks(1, on_rank) == [[4.0, 4.0, 4.0]]


def never(everywhere: bool) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    ddp = DDP(nn.Linear(2, 2), process_group=group)
    forgets = everywhere or dist.get_rank() == 1

    def forgetful(state: Any, bucket: Any) -> Any:
        return torch.futures.Future() if forgets else completed(bucket.buffer())

    ddp.register_comm_hook(None, forgetful)
    began = time.monotonic()
    try:
        ddp(torch.ones(1, 2)).sum().backward()
    except HookResultError as error:
        return str(error), time.monotonic() - began
    return "no error", 0.0


@pytest.mark.slow
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_future_that_is_never_completed(everywhere: bool) -> None:
    for text, took_s in run_ranks(2, never, everywhere):
        assert "hook" in text
        assert "forgetful for bucket 0 did not complete within 3.6 s" in text
        assert "rank 1" in text
        assert took_s >= 0.85 * TIMEOUT_S


def forgets_buffers() -> str:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    ddp = DDP(nn.BatchNorm1d(2), process_group=group)
    ddp._register_buffer_comm_hook(None, lambda state, buffers: [torch.futures.Future()])
    try:
        ddp(torch.ones(3, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_future_of_a_buffer_hook_that_is_never_completed() -> None:
    for text in run_ranks(2, forgets_buffers):
        assert "a future of the buffer hook did not complete within 3.6 s" in text
