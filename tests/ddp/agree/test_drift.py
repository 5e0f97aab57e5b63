"""Ranks that drift apart are told so: an error where they differ, a warning where all do alike.

What is right in torch's DDP stays silent: warnings are errors here (``test_drift_silence.py``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import BackwardOutsideNoSyncError, DesynchronizedError
from paceline.testing import run_ranks
from tests.ddp.compare import assert_close, batch, gradients, reference_gradients
from tests.ddp.models import mlp

Loop = Callable[[DDP, torch.optim.Optimizer, int], None]

TRANSPORTS = ["shm", "c10d"]
EACH_ONCE = [
    ("shm", 3),
    ("c10d", 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("shm", 2), ("c10d", 3))),
]


def loss(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    return model(batch(step, rank)).square().mean()


def make(transport: str = "auto", **options: object) -> tuple[DDP, torch.optim.Optimizer]:
    ddp = DDP(mlp(4), transport=transport, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(warning.message) for warning in caught)


def train(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp, step).backward()
    optimizer.step()


# --- ranks differ: an error on every rank --------------------------------------------------------


def no_sync_on_one(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    local = dist.get_rank() == 1 and step == 2
    with ddp.no_sync() if local else contextlib.nullcontext():
        train(ddp, optimizer, step)


def module_on_one(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    local = dist.get_rank() == 1 and step == 2
    optimizer.zero_grad()
    loss(ddp.module if local else ddp, step).backward()
    optimizer.step()


def skipped_update(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp, step).backward()
    if not (dist.get_rank() == 1 and step == 2):
        optimizer.step()


def local_after_sync(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The last micro-batch, not the first, is local on one rank: its gradient is never averaged."""
    optimizer.zero_grad()
    for micro in range(2):
        local = micro == (1 if dist.get_rank() == 1 and step == 2 else 0)
        with ddp.no_sync() if local else contextlib.nullcontext():
            loss(ddp, 2 * step + micro).backward()
    optimizer.step()


def by_hand(ddp: DDP, _: torch.optim.Optimizer, step: int) -> None:
    """No optimizer: parameters change in place."""
    ddp.zero_grad()
    local = dist.get_rank() == 1 and step == 2
    with ddp.no_sync() if local else contextlib.nullcontext():
        loss(ddp, step).backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter -= 0.01 * parameter.grad


DIFFERENT: dict[str, tuple[Loop, str]] = {
    "no_sync on one rank": (no_sync_on_one, "1 backward under no_sync"),
    "ddp.module on one rank": (module_on_one, "1 backward past the wrapper (ddp.module)"),
    "no optimizer.step on one rank": (skipped_update, "0 updates of the parameters"),
    "a local backward after the synchronised one": (local_after_sync, "never averaged"),
    "no optimizer at all": (by_hand, "1 backward under no_sync"),
}


def error_and_remedy(loop: Loop, transport: str) -> tuple[int, DesynchronizedError]:
    """Return the error of a loop, and in which step it came; then train on after the remedy."""
    ddp, optimizer = make(transport)
    with pytest.raises(DesynchronizedError) as caught:  # noqa: PT012
        for step in range(6):
            loop(ddp, optimizer, step)
    at = ddp.stats().steps
    again = DDP(ddp.module, transport=transport)
    again.zero_grad()
    loss(again, 9).backward()
    assert_close(gradients(again), reference_gradients(again, lambda m, rank: loss(m, 9, rank)))
    return at, caught.value


@pytest.mark.parametrize(("transport", "ranks"), EACH_ONCE)
def test_ranks_that_differ_raise(transport: str, ranks: int) -> None:
    def on_rank() -> dict[str, tuple[int, DesynchronizedError]]:
        return {how: error_and_remedy(loop, transport) for how, (loop, _) in DIFFERENT.items()}

    for found in run_ranks(ranks, on_rank):
        for how, (_, sign) in DIFFERENT.items():
            at, error = found[how]
            text = str(error)
            assert at in (3, 4), f"{how}: in the first step that is wrong, on every rank"
            assert error.rank == 1, how
            assert sign in next(line for line in text.splitlines() if "rank 1:" in line), how
            assert all(f"rank {rank}:" in text for rank in range(ranks))
            assert "no_sync()" in text
            assert "new DistributedDataParallel" in text


@pytest.mark.parametrize("step", [0, 2])
def test_before_the_first_common_step_it_is_a_warning(step: int) -> None:
    """Somebody may have tried something out; if it goes on, it is an error."""

    def on_rank() -> list[str]:
        ddp, optimizer = make()
        with recorded() as texts, contextlib.suppress(DesynchronizedError):
            if dist.get_rank() == 1:
                with ddp.no_sync():
                    train(ddp, optimizer, step)
            train(ddp, optimizer, 1)
            train(ddp, optimizer, 2)
        return texts

    for texts in run_ranks(2, on_rank):
        assert len(texts) == 1
        assert "Ranks are out of step" in texts[0]


# --- the forward inside of no_sync, the backward outside: an error at the update ----------------


def backward_outside(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    with ddp.no_sync():
        value = loss(ddp, step)
    value.backward()
    optimizer.step()


def last_backward_outside(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp, step).backward()
    with ddp.no_sync():
        value = loss(ddp, step + 50)
    value.backward()
    optimizer.step()


def in_a_closure(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        with ddp.no_sync():
            value = loss(ddp, step)
        value.backward()
        return value.item()

    optimizer.step(closure)


def tell(loop: Loop, transport: str) -> tuple[str, bool, bool]:
    """Return the error of a loop, whether parameters kept their values, and that it goes on."""
    ddp, optimizer = make(transport)
    train(ddp, optimizer, 0)
    before = [p.detach().clone() for p in ddp.parameters()]
    with pytest.raises(BackwardOutsideNoSyncError) as caught:
        loop(ddp, optimizer, 1)
    is_kept = all(map(torch.equal, before, ddp.parameters()))
    optimizer.zero_grad()
    with ddp.no_sync():
        first = loss(ddp, 2)
    first.backward()
    loss(ddp, 3).backward()
    wanted = reference_gradients(ddp, lambda m, rank: loss(m, 2, rank) + loss(m, 3, rank))
    assert_close(gradients(ddp), wanted)
    optimizer.step()
    return str(caught.value), is_kept, ddp.stats().steps > 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_backward_outside_of_no_sync_is_an_error_at_the_update(transport: str) -> None:
    def on_rank() -> list[tuple[str, bool, bool]]:
        return [tell(loop, transport) for loop in (backward_outside, last_backward_outside)]

    for rank, found in enumerate(run_ranks(2, on_rank)):
        for text, is_kept, goes_on in found:
            assert text.startswith(f"Rank {rank}: ")
            assert "Leave no_sync() for the last forward" in text
            assert is_kept, "the optimizer stepped all the same"
            assert goes_on


def test_a_closure_is_found_after_its_step() -> None:
    def on_rank() -> str:
        ddp, optimizer = make()
        with pytest.raises(BackwardOutsideNoSyncError) as caught:
            in_a_closure(ddp, optimizer, 0)
        return str(caught.value)

    assert all("no_sync()" in text for text in run_ranks(2, on_rank))


def test_one_rank_has_nothing_to_average() -> None:
    def on_rank() -> int:
        ddp, optimizer = make()
        for step in range(3):
            backward_outside(ddp, optimizer, step)
        return 1

    assert run_ranks(1, on_rank) == [1]


# --- a forward that raises on one rank -----------------------------------------------------------


class Picky(nn.Module):
    """Raises for a batch that holds a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("a bad batch")
        return self.body(x)


def skips(ddp: DDP, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    try:
        ddp(x).square().mean().backward()
    except ValueError:
        return
    optimizer.step()


@pytest.mark.parametrize(("transport", "ranks"), EACH_ONCE)
def test_a_caught_error_on_one_rank_is_a_warning_once(transport: str, ranks: int) -> None:
    """Parameters stay equal; but ranks are one batch apart from then on."""

    def on_rank() -> list[str]:
        ddp = DDP(Picky(), transport=transport)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        bad = {2, 4} if dist.get_rank() == 1 else set()
        with recorded() as texts:
            for step in range(6 + len(bad)):
                x = batch(step)
                skips(ddp, optimizer, torch.full_like(x, torch.nan) if step in bad else x)
        return texts

    for texts in run_ranks(ranks, on_rank):
        assert len(texts) == 1
        assert "rank 1: 1 forward" in texts[0]
        assert "join()" in texts[0]


# --- all ranks drift alike: a warning ------------------------------------------------------------


def everything_local(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    with ddp.no_sync():
        train(ddp, optimizer, step)


def always_module(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp.module, step).backward()
    optimizer.step()


def always_module_by_hand(ddp: DDP, _: torch.optim.Optimizer, step: int) -> None:
    ddp.zero_grad()
    loss(ddp.module, step).backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter -= 0.01 * parameter.grad


def always_local_last(ddp: DDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss(ddp, step).backward()
    with ddp.no_sync():
        loss(ddp, step + 50).backward()
    optimizer.step()


ALIKE: dict[str, tuple[Loop, str]] = {
    "everything under no_sync": (everything_local, "no_sync"),
    "model.module(x)": (always_module, "not model.module(x)"),
    "model.module(x), no optimizer": (always_module_by_hand, "not model.module(x)"),
    "the last micro-batch under no_sync": (always_local_last, "no_sync"),
}


def warnings_of(loop: Loop, transport: str) -> tuple[list[str], list[str]]:
    ddp, optimizer = make(transport)
    found = []
    for _ in range(2):
        with recorded() as texts:
            for step in range(20):
                loop(ddp, optimizer, step)
        found.append(texts)
    return found[0], found[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_drift_alike_are_warned_once(transport: str) -> None:
    def on_rank() -> dict[str, tuple[list[str], list[str]]]:
        return {how: warnings_of(loop, transport) for how, (loop, _) in ALIKE.items()}

    for found in run_ranks(2, on_rank):
        for how, (_, sign) in ALIKE.items():
            texts, later = found[how]
            assert len(texts) == 1, (how, texts)
            assert not later, how
            assert sign in texts[0], how
            assert "never averaged" in texts[0]


def test_the_warning_points_at_the_users_line() -> None:
    def on_rank() -> str:
        ddp, optimizer = make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                always_module(ddp, optimizer, step)
        return caught[0].filename

    assert all(name == __file__ for name in run_ranks(2, on_rank))
