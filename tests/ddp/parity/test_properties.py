"""Parity by property: drawn models, options and loops give the gradients of plain training.

Every case runs on real ranks. A failure prints the case: call ``replay(Case(...))`` with it. To let
hypothesis look for a smaller one, set ``PACELINE_SHRINK=1``.
"""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import (
    Gradients,
    TorchDDP,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    batch,
    gradients,
)
from tests.ddp.models import FEATURES, PARTS, Drawn, Part
from tests.examples import examples

ROWS = 3
CASES_PER_CALL = 4
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """One drawn training: a model, the wrapper's arguments, and a loop."""

    parts: tuple[Part, ...]
    graph: str = "plain"  # or: find unused; static
    views: bool | None = None
    cap_mb: float | None = None
    cap_mb_list: tuple[float, ...] | None = None
    batched_copy: bool = False
    skip_unused: bool = False
    steps: int = 2
    local_backwards: int = 0  # under no_sync, before the one that synchronises
    zero: str = "to none"  # or: to zero; never
    backward_twice: bool = False

    def options(self) -> dict[str, Any]:
        caps = {"bucket_cap_mb_list": list(self.cap_mb_list)} if self.cap_mb_list else {}
        return {
            "bucket_cap_mb": self.cap_mb,
            "gradient_as_bucket_view": self.views,
            "find_unused_parameters": self.graph == "find unused",
            "static_graph": self.graph == "static",
            "batched_grad_copy": self.batched_copy,
            "skip_all_reduce_unused_params": self.skip_unused,
            **caps,
        }

    def torch_can(self) -> bool:
        """Whether torch's DDP does this at all.

        A second backward it leaves unreduced; it asserts on a static graph whose first backward is
        under no_sync, and raises when a sparse gradient does not come.
        """
        learns_locally = self.graph == "static" and self.local_backwards > 0
        sparse_unused = any("sparse" in p.kind and p.used != "always" for p in self.parts)
        return not (self.backward_twice or learns_locally or sparse_unused)


@st.composite
def part(draw: st.DrawFn, uses: list[str]) -> Part:
    kind = draw(st.sampled_from(list(PARTS)))
    # torch adds sparse gradients on the CPU in single and double precision only.
    dtypes = DTYPES[1:3] if kind == "sparse embedding" else DTYPES
    return Part(kind, draw(st.sampled_from(dtypes)), draw(st.sampled_from(uses)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    graph = draw(st.sampled_from(["plain", "find unused", "static"]))
    uses = {
        "plain": ["always"],
        "find unused": ["always", "never", "first rank", "last rank", "even steps"],
        "static": ["always", "never", "first rank", "last rank"],
    }[graph]
    parts = draw(st.lists(part(uses), max_size=4))
    parts.append(Part(draw(st.sampled_from(["linear", "norm"])), torch.float32))
    parts = draw(st.permutations(parts))
    on_some_ranks = any(p.used in ("first rank", "last rank") for p in parts)
    return Case(
        parts=tuple(parts),
        graph=graph,
        views=draw(st.sampled_from([None, True, False])),
        cap_mb=draw(st.sampled_from([None, 1e-5, 2e-4, 4e-3, 1.0, 1000.0])),
        cap_mb_list=draw(st.sampled_from([None, None, None, (2e-4, 4e-3), (1.0, 1e-5)])),
        batched_copy=draw(st.booleans()),
        skip_unused=graph == "find unused" and not on_some_ranks and draw(st.booleans()),
        steps=draw(st.integers(1, 4)),
        local_backwards=draw(st.sampled_from([0, 0, 1, 2])),
        zero=draw(st.sampled_from(["to none", "to none", "to zero", "never"])),
        backward_twice=graph == "plain" and draw(st.sampled_from([False, False, False, True])),
    )


# --- in the ranks --------------------------------------------------------------------------------


def inputs(step: int, micro: int, rank: int) -> Tensor:
    return batch(10 * step + micro, rank, rows=ROWS, width=FEATURES).double()


def zero(model: nn.Module, how: str) -> None:
    if how != "never":
        model.zero_grad(set_to_none=how == "to none")


def train_step(model: DDP | TorchDDP, case: Case, step: int) -> None:
    """Some backward passes, of which the last one synchronises."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for micro in range(case.local_backwards + 1):
        is_local = micro < case.local_backwards
        with model.no_sync() if is_local else contextlib.nullcontext():
            loss = model(inputs(step, micro, rank), rank, world, step).mean()
            if case.backward_twice:
                loss.backward(retain_graph=True)
            if loss.requires_grad:
                loss.backward()


def train_step_alone(plain: Drawn, case: Case, step: int) -> None:
    """The same on the data of all ranks, in one process."""
    world = dist.get_world_size()
    for micro in range(case.local_backwards + 1):
        for loss in losses_alone(plain, case, step, micro, world):
            if loss.requires_grad:
                (loss * 2 if case.backward_twice else loss).backward()


def losses_alone(plain: Drawn, case: Case, step: int, micro: int, world: int) -> list[Tensor]:
    if all(part.used in ("always", "never", "even steps") for part in case.parts):
        everything = torch.cat([inputs(step, micro, rank) for rank in range(world)])
        return [plain(everything, 0, world, step).mean()]
    # What is used depends on the rank, so the batch cannot be concatenated.
    return [
        plain(inputs(step, micro, rank), rank, world, step).mean() / world for rank in range(world)
    ]


def check(case: Case) -> None:
    torch.manual_seed(3)
    model = Drawn(case.parts)
    plain = copy.deepcopy(model)
    theirs = None
    if dist.get_world_size() == 2 and case.torch_can():
        options = case.options() | {"gradient_as_bucket_view": bool(case.views)}
        theirs = TorchDDP(copy.deepcopy(model), **options)
    ours = DDP(model, **case.options())
    held = Held()
    for step in range(case.steps):
        for each in (ours, plain, theirs):
            if each is not None:
                zero(each, case.zero)
        train_step(ours, case, step)
        found = gradients(ours)
        train_step_alone(plain, case, step)
        assert_close(found, gradients(plain), f"step {step}, against one process:")
        assert_same_on_all_ranks(found)
        assert_strides(model)
        if case.views is None and case.zero == "to none":
            held.keep(model)
        if theirs is not None:
            train_step(theirs, case, step)
            assert_identical(found, gradients(theirs), f"step {step}, against torch's DDP:")
        learn(model, found)
        copy_state(model, plain)
        if theirs is not None:
            copy_state(model, theirs.module)
    held.check()


class Held:
    """Gradients that a user keeps from earlier steps, with the values they had then."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Tensor, Tensor]] = []

    def keep(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._kept.append((name, parameter.grad, parameter.grad.clone()))

    def check(self) -> None:
        for name, held, value in self._kept:
            assert torch.equal(held.to_dense(), value.to_dense()), (
                f"{name} changed under its holder"
            )


def assert_strides(model: nn.Module) -> None:
    """A gradient has the strides that plain autograd gives it."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            expected = torch.empty_like(parameter).stride()
            assert gradient.stride() == expected, f"{name}: {gradient.stride()} != {expected}"


@torch.no_grad()
def learn(model: nn.Module, found: Gradients) -> None:
    for name, parameter in model.named_parameters():
        if (gradient := found[name]) is not None:
            parameter -= 0.1 * gradient


@torch.no_grad()
def copy_state(source: nn.Module, target: nn.Module) -> None:
    """Let rounding errors not add up: every step starts from the same parameters and gradients."""
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.copy_(ours)


def check_all(cases: list[Case]) -> None:
    for case in cases:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"replay({case!r})") from error


def replay(case: Case, world: int = 2) -> None:
    """Run one printed case again."""
    run_ranks(world, check_all, [case], timeout_s=250)


# --- the properties ------------------------------------------------------------------------------

drawn = settings(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, *([Phase.shrink] if os.environ.get("PACELINE_SHRINK") else [])],
)


def run_drawn(world: int, batch_of_cases: list[Case]) -> None:
    note(f"world {world}: {batch_of_cases!r}")
    run_ranks(world, check_all, batch_of_cases, timeout_s=250)


@settings(drawn, max_examples=examples(30))
@given(st.lists(cases(), min_size=CASES_PER_CALL, max_size=CASES_PER_CALL))
def test_two_ranks_equal_one_process_and_torch(batch_of_cases: list[Case]) -> None:
    run_drawn(2, batch_of_cases)


@settings(drawn, max_examples=examples(10))
@given(st.lists(cases(), min_size=CASES_PER_CALL, max_size=CASES_PER_CALL))
def test_three_ranks_equal_one_process(batch_of_cases: list[Case]) -> None:
    run_drawn(3, batch_of_cases)
