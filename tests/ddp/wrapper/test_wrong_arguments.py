"""A wrong argument of the constructor is an error that names it, its value and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.ddp.arguments import check_norms
from paceline.errors import ArgumentTypeError, UntrainableModuleError
from paceline.nn import SyncBatchNorm
from paceline.testing import run_ranks
from tests.ddp.wrapper.test_phrases import error_of

ARGUMENTS: dict[str, list[Any]] = {
    "bucket_cap_mb": ["25", [25], object()],
    "bucket_cap_mb_list": [25, "25", ["25"], [None]],
    "device_ids": [0, "cpu"],
    "mixed_precision": ["bf16", torch.bfloat16],
    "device_mesh": ["cpu", 2],
    "find_unused_parameters": ["False", 0.5, []],
    "static_graph": ["no"],
    "gradient_as_bucket_view": ["yes"],
    "init_sync": ["no"],
    "forward_sync_buffers": ["no"],
    "broadcast_buffers": ["no"],
    "skip_all_reduce_unused_params": ["no"],
    "batched_grad_copy": ["no"],
    "check_reduction": ["no"],
}
DELAYED = {
    "delay_all_reduce_named_params": (["weight"], 3, "weight", {"weight": 1}),
    "param_to_hook_all_reduce": ("weight", 3),
}


def refuse_all() -> list[tuple[str, str, list[str], str]]:
    found = []
    for name, values in ARGUMENTS.items():
        for value in values:
            kinds, text = error_of(lambda n=name, v=value: DDP(nn.Linear(2, 2), **{n: v}))
            found.append((name, repr(value)[:30], kinds, text))
    for name, wrong in DELAYED.items():
        for value in wrong:
            model = nn.Linear(2, 2)
            good = {
                "delay_all_reduce_named_params": [("weight", model.weight)],
                "param_to_hook_all_reduce": model.weight,
            }
            kinds, text = error_of(lambda m=model, o=good | {name: value}: DDP(m, **o))
            found.append((name, repr(value)[:30], kinds, text))
    for module in (None, "net", nn.Linear, torch.sin):
        kinds, text = error_of(lambda m=module: DDP(m))
        found.append(("module", repr(module)[:30], kinds, text))
    return found


def test_wrong_types() -> None:
    for name, shown, kinds, text in run_ranks(1, refuse_all)[0]:
        assert kinds[:1] == [ArgumentTypeError.__name__], (name, shown, kinds, text)
        assert {"ValueError", "TypeError"} <= set(kinds)
        assert name in text
        assert shown in text
        assert "Write for example" in text


def test_what_torch_takes_is_taken() -> None:
    """None is false, and numbers may be of any kind."""

    def on_rank() -> int:
        size = torch.tensor(25)
        for options in (
            {"find_unused_parameters": None, "static_graph": None, "batched_grad_copy": None},
            {"find_unused_parameters": 1, "bucket_cap_mb": size},
            {"bucket_cap_mb_list": (1, 2.5)},
            {"bucket_cap_mb": 0.5, "gradient_as_bucket_view": 0},
        ):
            DDP(nn.Linear(2, 2), **options)(torch.ones(1, 2)).sum().backward()
        return 0

    assert run_ranks(1, on_rank) == [0]


def built_for_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (built_for_inference, "built under torch.inference_mode()"),
        (lambda: nn.Linear(2, 2, device="meta"), "to_empty"),
    ],
)
def test_parameters_that_cannot_be_trained(build: Callable[[], nn.Module], words: str) -> None:
    kinds, text = run_ranks(1, lambda: error_of(lambda: DDP(build())))[0]
    assert kinds[:1] == [UntrainableModuleError.__name__]
    assert "RuntimeError" in kinds
    assert words in text


def test_construction_under_inference_mode() -> None:
    """As with torch, the wrapper can be used, and even trained, afterwards."""

    def on_rank() -> torch.Tensor:
        model = nn.Linear(2, 2)
        with torch.inference_mode():
            ddp = DDP(model)
            ddp(torch.ones(1, 2))
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
        return model.weight.grad

    for gradient in run_ranks(2, on_rank):
        torch.testing.assert_close(gradient, torch.full((2, 2), 1.5))


def test_frozen_on_one_rank() -> None:
    def on_rank() -> tuple[str, str]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ddp = DDP(model)
        model[0].requires_grad_(dist.get_rank() == 0)
        before = error_of(lambda: DDP(model))[1]
        after = error_of(lambda: ddp(torch.ones(1, 2)).sum().backward())[1]
        return before, after

    for texts in run_ranks(2, on_rank):
        for text in texts:
            assert "requires_grad" in text
            assert "0.weight" in text
            assert "rank 1" in text


def test_our_norm_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that replace the name, as torch's own tests do here, are not refused."""
    check_norms(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"paceline\.nn\.SyncBatchNorm"):
        check_norms(nn.SyncBatchNorm(2))
    monkeypatch.setattr(torch.nn, "SyncBatchNorm", SyncBatchNorm)
    check_norms(nn.Sequential(torch.nn.SyncBatchNorm(2)))
