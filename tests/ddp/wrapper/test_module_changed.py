"""What users do to a module after they have wrapped it: averaged as before, or an error with names.

Nothing may be trained on gradients that nobody averages. What torch's DDP hears of is compared with
it; new parameters, which it never hears of, are an error here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import parametrizations, prune

from paceline import DistributedDataParallel as DDP
from paceline.errors import GradientMismatchError, ParametersChangedError, UnusedParametersError
from paceline.testing import run_ranks
from tests.ddp.compare import (
    Gradients,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    gradients,
    pair,
    reference_gradients,
)
from tests.ddp.models import mlp


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def loss(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    return model(batch(step, rank)).square().mean()


def expected(change: Callable[[nn.Module], object], step: int) -> Gradients:
    """The gradients of one process that has all ranks' data and a module with the same change."""
    plain = net()
    torch.manual_seed(7)
    change(plain)
    plain.eval()
    world = dist.get_world_size()
    (sum(loss(plain, step, rank) for rank in range(world)) / world).backward()
    return gradients(plain)


def assign(module: nn.Module) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def exchange(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(torch.ones(4, 4))


def overwrite(module: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        module.to(torch.float32)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(module[0])


def add_lora(module: nn.Module) -> None:
    module[0].requires_grad_(False)
    module.add_module("lora", nn.Linear(2, 2))


NEW: dict[str, tuple[Callable[[nn.Module], None], set[str]]] = {
    "load_state_dict(assign=True)": (assign, {"0.weight", "0.bias", "2.weight", "2.bias"}),
    "another Parameter": (exchange, {"0.weight"}),
    "conversion that overwrites": (overwrite, {"0.weight", "0.bias", "2.weight", "2.bias"}),
    "weight_norm": (weight_norm, {"0.weight_g", "0.weight_v"}),
    "weight_norm as a parametrization": (
        lambda module: parametrizations.weight_norm(module[0]),
        {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
    ),
    "LoRA": (add_lora, {"lora.weight", "lora.bias"}),
}


@pytest.mark.parametrize("how", NEW)
def test_new_parameters_are_an_error(how: str) -> None:
    change, names = NEW[how]

    def on_rank() -> Exception:
        ddp = DDP(net())
        loss(ddp, 0).backward()
        ddp.zero_grad()
        change(ddp.module)
        with pytest.raises(ParametersChangedError) as caught:
            loss(ddp, 1)
        # The remedy: wrap again.
        again = DDP(ddp.module)
        loss(again, 2).backward()
        assert_same_on_all_ranks(gradients(again))
        return caught.value

    for rank, error in enumerate(run_ranks(2, on_rank)):
        assert set(error.parameters) == names
        assert error.rank == rank
        assert all(name in str(error) for name in names)
        assert "assign=True" in str(error)
        assert "wrap the module in a new" in str(error)


def to_empty(module: nn.Module) -> None:
    values = copy.deepcopy(module.state_dict())
    module.to_empty(device="cpu")
    module.load_state_dict(values)


def exchange_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def old_spectral_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.spectral_norm(module[0])


KEPT: dict[str, Callable[[nn.Module], object]] = {
    "load_state_dict": lambda module: module.load_state_dict(module.state_dict()),
    "to_empty": to_empty,
    "other data": exchange_data,
    "orthogonal": lambda module: parametrizations.orthogonal(module[0]),
    "spectral_norm as a parametrization": lambda module: parametrizations.spectral_norm(module[0]),
    "spectral_norm": old_spectral_norm,
    "pruned": lambda module: prune.l1_unstructured(module[0], "weight", 0.5),
    "frozen and trained again": lambda m: m.requires_grad_(False).requires_grad_(True),
}


@pytest.mark.parametrize("how", KEPT)
def test_parameters_that_are_kept_are_averaged(how: str) -> None:
    """Also under another name, and if autograd has forgotten our hooks."""

    def on_rank() -> None:
        ddp = DDP(net())
        loss(ddp, 0).backward()
        ddp.zero_grad()
        torch.manual_seed(7)
        KEPT[how](ddp.module)
        for step in range(1, 3):
            ddp.eval()  # spectral_norm draws anew in every forward that trains
            ddp.zero_grad()
            loss(ddp, step).backward()
            assert_same_on_all_ranks(gradients(ddp))
            assert_close(gradients(ddp), expected(KEPT[how], step))

    run_ranks(2, on_rank)


def test_removed_parameters_are_named() -> None:
    def on_rank() -> Exception:
        ddp = DDP(net())
        loss(ddp, 0).backward()
        del ddp.module[2]
        with pytest.raises(UnusedParametersError) as caught:
            loss(ddp, 1).backward()
        return caught.value

    for error in run_ranks(2, on_rank):
        assert error.parameters == ("2.weight", "2.bias")


def test_swapped_tensors_are_a_conversion() -> None:
    """torch.__future__.set_swap_module_params_on_conversion keeps the objects, not their nodes."""

    def on_rank() -> Exception:
        ddp = DDP(net())
        loss(ddp, 0).backward()
        ddp.zero_grad()
        torch.__future__.set_swap_module_params_on_conversion(True)
        ddp.module.double()
        with pytest.raises(GradientMismatchError) as caught:
            ddp(batch(1).double()).square().mean().backward()
        return caught.value

    for error in run_ranks(2, on_rank):
        assert "torch.float64" in str(error)


@pytest.mark.parametrize("missing", ["raise", "wait"])
def test_all_frozen_for_a_while(missing: str) -> None:
    """A GAN's discriminator is frozen while its generator learns: as with torch, nothing of it is
    reduced, and what is before it gets its gradients.
    """

    def on_rank() -> None:
        model = net()
        ours, theirs = pair(model)
        ours = DDP(copy.deepcopy(model), missing_gradients=missing)
        for step in range(4):
            found = []
            for ddp in (ours, theirs):
                ddp.requires_grad_(step % 2 == 0)
                ddp.zero_grad()
                x = batch(step).requires_grad_()
                ddp(x).square().mean().backward()
                found.append(x.grad)
            assert torch.equal(*found)
            assert_close(gradients(ours), gradients(theirs))
        assert ours.stats().steps == 2

    run_ranks(2, on_rank)


def test_frozen_with_mixed_precision() -> None:
    """There, hooks are set anew before every forward: also on a parameter that is frozen."""

    def on_rank() -> None:
        config = _MixedPrecision(param_dtype=torch.bfloat16)
        ddp = DDP(net(), mixed_precision=config, find_unused_parameters=True)
        ddp.module[0].bias.requires_grad_(False)
        loss(ddp, 0).backward()
        assert ddp.module[0].bias.grad is None
        found = gradients(ddp)
        assert_same_on_all_ranks(found)
        assert found["0.weight"] is not None

    run_ranks(2, on_rank)


def test_transforms_of_inputs() -> None:
    """torch.func.grad for inputs: each rank its own, on one rank alone."""

    def on_rank() -> None:
        ddp, plain = DDP(mlp(4)), mlp(4)
        if dist.get_rank() == 0:
            found, expected = (
                torch.func.grad(lambda x, m=model: m(x).square().mean())(batch(0))
                for model in (ddp, plain)
            )
            assert torch.equal(found, expected)
        loss(ddp, 1).backward()
        assert_close(gradients(ddp), reference_gradients(ddp, lambda m, r: loss(m, 1, r)))

    run_ranks(2, on_rank)
