"""One drawn combination of features, trained on all ranks and beside it in one process.

Runs in the ranks; :mod:`tests.ddp.parity.test_pairs` chooses the cases and looks at what was seen.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import _apply_optimizer_in_backward

from paceline import DistributedDataParallel as DDP
from paceline.hooks import allreduce_hook
from paceline.torch_private.modules import MixedPrecisionConfig
from tests.ddp.compare import TOLERANCES, batch

WIDTH, STEPS, RATE = 4, 3, 0.1
SPOILED_STEP = 1
FEATURES: dict[str, list[Any]] = {
    "weighted": [False, True],
    "no_sync": [False, True],
    "hook": [False, True],
    "join": [False, True],
    "graph": ["plain", "static", "unused"],
    "precision": ["full", "mixed"],
    "tied": [False, True],
    "wrappers": ["one", "nested", "siblings"],
    "forwards": [1, 2],
    "sparse": [False, True],
    "delayed": [False, True],
    "nonfinite": ["ignore", "skip"],
    "optimizer": ["after", "in backward"],
    "transport": ["shm", "c10d"],
    "check_every": [None, 1],
    "buckets": ["many", "one"],
    "views": [None, True, False],
    "zero": ["to none", "never"],
    "lazy": [False, True],
    "finalize": ["in backward", "by hand"],
}


class Net(nn.Module):
    """Layers that siblings share, and a head of its own."""

    def __init__(self, case: dict[str, Any], shared: nn.ModuleDict) -> None:
        super().__init__()
        self.shared = shared
        self.head = nn.Linear(WIDTH, 3)
        self.some = nn.Linear(WIDTH, WIDTH) if case["graph"] != "plain" else None
        self.never = nn.Linear(WIDTH, WIDTH) if case["graph"] != "plain" else None

    def forward(self, x: Tensor, rank: int) -> Tensor:
        out = self.shared["first"](x).tanh()
        out = self.shared["second"](out).tanh()
        if "words" in self.shared:
            out = out + self.shared["words"]((x.abs() * 10).long() % 7).sum(dim=1)
        if self.some is not None and rank == 0:
            out = out + self.some(x.to(self.some.weight.dtype))
        return self.head(out)


class Around(nn.Module):
    """Runs another module, which may be wrapped, and has a layer of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.middle = nn.Linear(3, 3)
        self.own = nn.Linear(3, 3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.own(self.middle(self.inner(x, rank).tanh()))


def build(case: dict[str, Any]) -> list[nn.Module]:
    torch.manual_seed(5)
    shared = nn.ModuleDict(
        {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
        | ({"words": nn.Embedding(7, WIDTH, sparse=True)} if case["sparse"] else {})
    )
    if case["tied"]:
        shared["second"].weight = shared["first"].weight
    nets = [Net(case, shared) for _ in range(2 if case["wrappers"] == "siblings" else 1)]
    return [Around(nets[0])] if case["wrappers"] == "nested" else list(nets)


def options_of(case: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    config = MixedPrecisionConfig(param_dtype=torch.float64)  # so numbers can be compared
    options: dict[str, Any] = {
        "transport": case["transport"],
        "gradient_as_bucket_view": case["views"],
        "static_graph": case["graph"] == "static",
        "find_unused_parameters": case["graph"] == "unused",
        "nonfinite": case["nonfinite"],
        "check_every": case["check_every"],
        "mixed_precision": config if case["precision"] == "mixed" else None,
        "bucket_cap_mb": 1e-4 if case["buckets"] == "many" else None,
        "lazy_bucket_allocation": case["lazy"],
    }
    if case["delayed"]:
        head = "own" if isinstance(model, Around) else "head"
        options["delay_all_reduce_named_params"] = [
            (name, p) for name, p in model.named_parameters() if name.startswith(head)
        ]
        net = model.inner.module if isinstance(model, Around) else model
        options["param_to_hook_all_reduce"] = net.shared["first"].weight
    return options


def wrap(case: dict[str, Any], models: list[nn.Module]) -> list[DDP]:
    """Return all wrappers; the first ones are those that are called."""
    inner = []
    if case["wrappers"] == "nested":
        options = options_of(case | {"delayed": False}, models[0].inner)
        models[0].inner = DDP(models[0].inner, **options)
        inner.append(models[0].inner)
    wrapped = [DDP(model, **options_of(case, model)) for model in models]
    for each in (*wrapped, *inner):
        each.require_manual_backward_finalization = case["finalize"] == "by hand"
        if case["hook"]:
            each.register_comm_hook(None, allreduce_hook)
    return [*wrapped, *inner]


# --- one training --------------------------------------------------------------------------------


class Training:
    """The same training twice: on all ranks, and in this process alone."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.models = build(case)
        self.plain = copy.deepcopy(nn.ModuleList(self.models))
        self.parameters = list(nn.ModuleList(self.models).parameters())
        if case["optimizer"] == "in backward":
            _apply_optimizer_in_backward(torch.optim.SGD, self.parameters, {"lr": RATE})
        self.wrappers = wrap(case, self.models)
        self.called = self.wrappers[: len(self.models)]

    def steps_of(self, rank: int) -> int:
        """Rank 0 has the most inputs, if they are uneven."""
        return STEPS - min(rank, 1) if self.case["join"] else STEPS

    def active(self, step: int) -> list[int]:
        return [rank for rank in range(self.world) if step < self.steps_of(rank)]

    def is_spoiled(self, step: int) -> bool:
        return self.case["nonfinite"] == "skip" and step == SPOILED_STEP

    def loss(self, models: Sequence[nn.Module], step: int, micro: int, rank: int) -> Tensor:
        total = torch.zeros(())
        for number, model in enumerate(models):
            for forward in range(self.case["forwards"]):
                x = batch(100 * step + 10 * micro + 3 * number + forward, rank)
                total = total + model(x, rank).square().mean().float()
        bad = self.is_spoiled(step) and rank == min(1, self.world - 1)
        return total * math.nan if bad else total

    def micros(self) -> Iterator[tuple[int, bool]]:
        if self.case["no_sync"]:
            yield 0, True
        yield 1, False

    def weight(self, rank: int) -> float:
        return float(rank + 1)

    def run_step(self, step: int) -> None:
        """On this rank."""
        for micro, is_local in self.micros():
            with contextlib.ExitStack() as stack:
                for wrapper in self.called:
                    if self.case["weighted"]:
                        stack.enter_context(wrapper.weighted(self.weight(self.rank)))
                    if is_local:
                        stack.enter_context(wrapper.no_sync())
                self.loss(self.called, step, micro, self.rank).backward()
        if self.case["finalize"] == "by hand":
            for wrapper in self.wrappers:
                wrapper.finalize_backward()

    def run_step_alone(self, step: int) -> None:
        """On the data of all ranks."""
        ranks = self.active(step)
        weights = [self.weight(rank) if self.case["weighted"] else 1.0 for rank in ranks]
        divisor = sum(weights) if self.case["weighted"] else self.world
        if not self.case["weighted"]:  # ranks that have joined have no part of what was kept
            scale(self.plain, len(ranks) / self.world)
        for rank, weight in zip(ranks, weights, strict=True):
            for micro, _ in self.micros():
                loss = self.loss(list(self.plain), step, micro, rank)
                (loss * weight / divisor).backward()
        if self.is_spoiled(step):
            for parameter in self.plain.parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter)

    def compare_gradients(self, step: int) -> None:
        pairs = zip(self.plain.named_parameters(), self.parameters, strict=True)
        for (name, theirs), ours in pairs:
            if self.case["optimizer"] == "in backward":
                assert ours.grad is None, f"step {step}: {name} has a gradient left"
            else:
                compare(ours.grad, theirs.grad, f"step {step}: gradient of {name}")

    def compare_weights(self, step: int) -> None:
        pairs = zip(self.plain.named_parameters(), self.parameters, strict=True)
        for (name, theirs), ours in pairs:
            compare(ours.detach(), theirs.detach(), f"after step {step}: {name}")

    @torch.no_grad()
    def learn(self, *, has_joined: bool = False) -> None:
        waits = has_joined or self.case["optimizer"] == "in backward"
        for parameter in (*([] if waits else self.parameters), *self.plain.parameters()):
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad.to_dense()

    def zero(self) -> None:
        how = self.case["zero"]
        if how == "to none":
            for parameter in self.parameters:
                parameter.grad = None
        if how == "to none" or self.case["optimizer"] == "in backward":
            for parameter in self.plain.parameters():
                parameter.grad = None

    def run(self) -> None:
        """Train and compare after every step, and at the end, when all have joined."""
        join = Join(self.wrappers) if self.case["join"] else contextlib.nullcontext()
        with join:
            for step in range(self.steps_of(self.rank)):
                self.zero()
                self.run_step(step)
                self.run_step_alone(step)
                self.compare_gradients(step)
                self.learn()
                self.compare_weights(step)
        for step in range(self.steps_of(self.rank), self.steps_of(0)):
            self.zero()
            self.run_step_alone(step)
            self.learn(has_joined=True)
        self.compare_weights(STEPS)


def scale(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and factor != 1.0:
            parameter.grad *= factor


def train_cases(cases: Sequence[dict[str, Any]]) -> None:
    """In a rank: train every case; the first that is wrong ends it, for the others would wait."""
    for case in cases:
        try:
            Training(case).run()
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n  replay({case!r})") from error


def run_cases(cases: Sequence[dict[str, Any]]) -> list[BaseException | None]:
    """In a rank: train every case; return what each raised. For cases that raise on all ranks."""
    raised: list[BaseException | None] = []
    for case in cases:
        try:
            Training(case).run()
            raised.append(None)
        except Exception as error:
            raised.append(error.with_traceback(None))
    return raised


def compare(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    if ours is None or theirs is None:
        assert ours is theirs, f"{what}: {ours} instead of {theirs}"
        return
    rtol, atol = TOLERANCES[theirs.dtype]
    assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype}"
    torch.testing.assert_close(
        ours.to_dense(),
        theirs.to_dense(),
        rtol=10 * rtol,
        atol=10 * atol,
        msg=lambda m: f"{what}: {m}",
    )
