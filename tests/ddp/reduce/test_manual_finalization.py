"""require_manual_backward_finalization: the program ends steps. The names are torch 2.15's.

With everything else together: ``tests/ddp/parity/test_pairs.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline.errors import FinalizationError, UnusedParametersError
from paceline.testing import run_ranks
from tests.ddp.compare import assert_identical, batch, gradients
from tests.ddp.models import Branches, mlp

IN_TORCH = hasattr(TorchDDP, "finalize_backward")


def held(model: nn.Module, make: Any = DDP, **options: Any) -> Any:
    ddp = make(model, **options)
    ddp.require_manual_backward_finalization = True
    return ddp


def loss_of(ddp: nn.Module, number: int = 0) -> Tensor:
    loss: Tensor = ddp(batch(number)).square().mean()
    return loss


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_gradients_are_the_same_bit_for_bit(transport: str) -> None:
    def on_rank() -> None:
        options = {"bucket_cap_mb": 1e-4, "transport": transport}
        ours = held(mlp(4, depth=4), **options)
        references: list[Any] = [DDP(mlp(4, depth=4), **options)]
        if IN_TORCH:
            references.append(held(mlp(4, depth=4), TorchDDP, bucket_cap_mb=1e-4))
        for number in range(4):
            for ddp in (ours, *references):
                ddp.zero_grad()
                loss_of(ddp, number).backward()
                if ddp is not references[0]:
                    ddp.finalize_backward()
            for reference in references:
                assert_identical(gradients(ours), gradients(reference), f"step {number}")

    run_ranks(2, on_rank)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_backward_waits_for_nobody(transport: str) -> None:
    """Rank 1 does not begin its backward before that of rank 0 has returned."""

    def on_rank() -> float:
        ddp = held(mlp(4), transport=transport)
        loss_of(ddp).backward()  # the plan is agreed on at the beginning of the next, once
        ddp.finalize_backward()
        loss_of(ddp).backward()
        ddp.finalize_backward()
        ddp.zero_grad()
        store = dist.distributed_c10d._get_default_store()
        loss = loss_of(ddp, 1)
        if dist.get_rank() == 1:
            store.wait(["returned"])
        loss.backward()
        if dist.get_rank() == 0:
            store.set("returned", "")
        other = torch.ones(1)
        dist.all_reduce(other)  # of the program's own, meanwhile
        ddp.finalize_backward()
        return float(other)

    assert run_ranks(2, on_rank) == [2.0, 2.0]


def test_can_be_called_inside_of_the_backward() -> None:
    def on_rank() -> tuple[list[bool], list[bool]]:
        front = nn.Linear(4, 4)
        ours, reference = held(mlp(4)), DDP(mlp(4))
        must_wait: list[bool] = []
        done: list[bool] = []

        def on_gradient(_: Tensor) -> None:
            if not must_wait[-1]:
                ours.finalize_backward()
                assert_identical(gradients(ours), gradients(reference))
                done.append(True)

        for number in range(3):
            x = front(batch(number))
            for ddp in (reference, ours):
                ddp.zero_grad()
            reference(x.detach()).square().mean().backward()
            x.register_hook(on_gradient)
            loss = ours(x).square().mean()
            must_wait.append(ours.should_finalize_after_backward)
            loss.backward()
            if must_wait[-1]:
                ours.finalize_backward()
                assert_identical(gradients(ours), gradients(reference))
        return must_wait, done

    for must_wait, done in run_ranks(2, on_rank):
        assert must_wait == [True, False, False]
        assert done == [True, True]


def finalize_twice(ddp: Any) -> None:
    loss_of(ddp).backward()
    ddp.finalize_backward()
    ddp.finalize_backward()


def finalize_what_is_local(ddp: Any) -> None:
    with ddp.no_sync():
        loss_of(ddp).backward()
    ddp.finalize_backward()


def finalize_without_asking_for_it(ddp: Any) -> None:
    ddp.require_manual_backward_finalization = False
    ddp.finalize_backward()


def forget(ddp: Any) -> None:
    loss_of(ddp).backward()
    loss_of(ddp, 1)


def change_between(ddp: Any) -> None:
    loss_of(ddp)
    ddp.require_manual_backward_finalization = False


def finalize_too_early(ddp: Any) -> None:
    for number in range(2):
        loss_of(ddp, number).backward()
        ddp.finalize_backward()
    ddp.module[-1].weight.register_hook(lambda _: ddp.finalize_backward())
    loss_of(ddp, 2).backward()


MISTAKES: dict[str, Callable[[Any], None]] = {
    "no gradient reduction requires finalization": finalize_twice,
    "This can happen if no_sync() is active": finalize_what_is_local,
    "called but manual backward finalization is not required": finalize_without_asking_for_it,
    "Expected to have finalized the prior backward pass before starting a new one": forget,
    "while a backward pass is expected or in progress": change_between,
    "finalize_backward() called before all DDP buckets were ready": finalize_too_early,
}


def test_mistakes_have_torchs_words() -> None:
    def on_rank() -> list[tuple[str, str, str]]:
        found = []
        for phrase, make_mistake in MISTAKES.items():
            for make in (DDP, TorchDDP) if IN_TORCH else (DDP,):
                with pytest.raises(RuntimeError) as raised:
                    make_mistake(held(mlp(4), make))
                found.append((phrase, type(raised.value).__name__, str(raised.value)))
        return found

    for found in run_ranks(2, on_rank):
        for phrase, kind, text in found:
            assert phrase in text
            assert kind in ("RuntimeError", FinalizationError.__name__)


def test_a_second_backward_is_refused_before_it_changes_anything() -> None:
    def on_rank() -> None:
        ddp, reference = held(mlp(4)), DDP(mlp(4))
        loss = loss_of(ddp)
        loss.backward(retain_graph=True)
        with pytest.raises(FinalizationError, match="Expected to have finalized"):
            loss.backward()
        ddp.finalize_backward()
        loss_of(reference).backward()
        assert_identical(gradients(ddp), gradients(reference))

    run_ranks(2, on_rank)


def test_errors_of_the_step_are_raised_on_every_rank_where_it_ends() -> None:
    def on_rank() -> None:
        ddp = held(Branches())
        ddp(batch(), "ab" if dist.get_rank() == 0 else "abc").sum().backward()
        with pytest.raises(UnusedParametersError, match=r"branches\.c"):
            ddp.finalize_backward()
        ddp.zero_grad()
        ddp(batch(), "abc").sum().backward()
        ddp.finalize_backward()

    run_ranks(2, on_rank)


def test_a_wrapper_over_the_same_layers_must_wait() -> None:
    def on_rank() -> None:
        model = mlp(4)
        first, second = held(model), DDP(model)
        loss_of(first).backward()
        with pytest.raises(FinalizationError, match="Expected to have finalized"):
            loss_of(second).backward()
        first.finalize_backward()
        second.zero_grad()
        loss_of(second).backward()
        reference = DDP(mlp(4))
        loss_of(reference).backward()
        assert_identical(gradients(second), gradients(reference))

    run_ranks(2, on_rank)


def test_survives_pickling() -> None:
    def on_rank() -> None:
        ddp = held(mlp(4))
        again = pickle.loads(pickle.dumps(ddp))
        assert again.require_manual_backward_finalization
        for each in (ddp, again):
            loss_of(each).backward()
            each.finalize_backward()
        assert_identical(gradients(again), gradients(ddp))

    run_ranks(2, on_rank)


def test_needs_something_that_is_reduced_in_buckets() -> None:
    def on_rank() -> None:
        model = mlp(4)
        ddp = DDP(
            model,
            delay_all_reduce_named_params=list(model.named_parameters()),
            param_to_hook_all_reduce=next(model.parameters()),
        )
        with pytest.raises(FinalizationError, match="not supported when all DDP parameters"):
            ddp.require_manual_backward_finalization = True
        ddp.require_manual_backward_finalization = False
        assert not ddp.should_finalize_after_backward

    run_ranks(1, on_rank)
