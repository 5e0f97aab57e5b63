"""Wrappers that share layers and cannot agree in one backward: every rank raises, by name."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import SharedParametersError
from paceline.torch_private.modules import MixedPrecisionConfig
from tests.ddp.checks import Checks, Outcomes, assert_passed
from tests.ddp.compare import assert_close, gradients
from tests.ddp.parity.test_sharing import loss_of, nets, total

check = Checks()


def refused(wrappers: Sequence[nn.Module], match: str) -> None:
    """Every rank raises the same, and afterwards each wrapper works again."""
    with pytest.raises(SharedParametersError, match=match) as caught:
        total(wrappers, 0).backward()
    assert any("shared" in name for name in caught.value.parameters)


def check_each_alone(models: nn.ModuleList, wrappers: Sequence[nn.Module]) -> None:
    plain = copy.deepcopy(models)
    world = dist.get_world_size()
    for number, (model, wrapper) in enumerate(zip(plain, wrappers, strict=True)):
        models.zero_grad()
        plain.zero_grad()
        loss_of(wrapper, number, 1).backward()
        for rank in range(world):
            (loss_of(model, number, 1, rank) / world).backward()
        assert_close(gradients(models), gradients(plain))


@check.each((3.0, None), (None, 3.0), (2.0, 3.0))
def different_weights_are_refused(weights: tuple[float | None, float | None]) -> None:
    models = nets()
    wrappers = [DDP(model) for model in models]
    for wrapper, weight in zip(wrappers, weights, strict=True):
        wrapper.reducer.runner.weight = weight
    refused(wrappers, "weighs this step differently")
    for wrapper in wrappers:
        wrapper.reducer.runner.weight = None
    check_each_alone(models, wrappers)


@check
def a_weight_that_differs_on_one_rank_is_refused_on_all() -> None:
    wrappers = [DDP(model) for model in nets()]
    with wrappers[0].weighted(2.0), wrappers[1].weighted(2.0 + dist.get_rank()):
        refused(wrappers, r"rank 1: .*weighted\(")


@check
def leaving_out_steps_on_one_only_is_refused() -> None:
    models = nets()
    wrappers = [DDP(models[0], nonfinite="skip"), DDP(models[1])]
    refused(wrappers, "nonfinite")
    check_each_alone(models, wrappers)


@check
def different_groups_are_refused() -> None:
    models = nets()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    wrappers = [DDP(models[0]), DDP(models[1], process_group=alone)]
    refused(wrappers, "average over ranks")


@check.each((True, True), (True, False), (False, True))
def mixed_precision_is_refused(low: tuple[bool, bool]) -> None:
    """Never silently wrong; and the parameters are in full precision afterwards."""
    config = MixedPrecisionConfig(param_dtype=torch.bfloat16)
    models = nets()
    before = copy.deepcopy(models.state_dict())
    wrappers = [
        DDP(model, mixed_precision=config if is_low else None)
        for model, is_low in zip(models, low, strict=True)
    ]
    with pytest.raises(RuntimeError):
        total(wrappers, 0).backward()
    for wrapper in wrappers:
        wrapper.state_dict()  # brings full precision back
    for name, value in models.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", check.names)
def test_two_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
