"""torch's own wrapper and ours on the same parameters: right, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import ForeignWrapperError, SharedParametersError
from tests.ddp.checks import Checks, Outcomes, assert_passed
from tests.ddp.compare import TorchDDP, batch
from tests.ddp.parity.test_sharing import WIDTH, Net, backward_alone, check_steps, nets, total

check = Checks()


@check
def torchs_wrapper_around_ours_is_refused() -> None:
    for views in (True, False):
        net = Net(nn.Linear(WIDTH, WIDTH))
        both = TorchDDP(DDP(net), gradient_as_bucket_view=views)
        with pytest.raises(ForeignWrapperError, match=r"nn\.parallel.*around") as caught:
            both(batch(0))
        assert "shared.weight" in caught.value.parameters


@check
def torchs_wrapper_around_ours_may_leave_our_parameters_alone() -> None:
    torch.manual_seed(0)
    outer = nn.Sequential(DDP(nn.Linear(4, 4)), nn.Linear(4, 4))
    TorchDDP._set_params_and_buffers_to_ignore_for_model(
        outer, [name for name, _ in outer.named_parameters() if name.startswith("0.")]
    )
    plain = nn.Sequential(copy.deepcopy(outer[0].module), copy.deepcopy(outer[1]))
    both = TorchDDP(outer)
    world = dist.get_world_size()
    both(batch(0)).square().mean().backward()
    for rank in range(world):
        (plain(batch(0, rank)).square().mean() / world).backward()
    found = [p.grad for p in outer.parameters()]
    for one, other in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


@check.each((DDP, TorchDDP), (TorchDDP, DDP))
def torchs_wrapper_beside_ours(order: tuple[type, type]) -> None:
    for zero in (True, False):
        models = nets()
        wrappers = [wrap(model) for wrap, model in zip(order, models, strict=True)]
        check_steps(models, wrappers, zero=zero)


@check
def torchs_wrapper_beside_ours_with_views_or_weights_is_refused() -> None:
    models = nets()
    ours, theirs = DDP(models[0]), TorchDDP(models[1], gradient_as_bucket_view=True)
    with pytest.raises(ForeignWrapperError, match="gradient_as_bucket_view=False"):
        ours(batch(0))
    del theirs
    ours(batch(0)).square().mean().backward()  # it is gone
    models = nets()
    wrappers = [DDP(models[0]), TorchDDP(models[1])]
    with (
        wrappers[0].weighted(2.0),
        pytest.raises(SharedParametersError, match="torch's"),
    ):
        total(wrappers, 0).backward()
    ours = wrappers.pop(0)
    del wrappers
    models.zero_grad()
    with ours.weighted(2.0):  # torch's is gone
        ours(batch(0)).square().mean().backward()


@check
def torchs_wrapper_inside_ours_is_left_alone() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(WIDTH, WIDTH)
    plain = nn.ModuleList([Net(copy.deepcopy(inner))])
    net = Net(TorchDDP(inner))
    net.own.load_state_dict(plain[0].own.state_dict())
    ours = DDP(net)
    for step in range(3):
        net.zero_grad()
        plain.zero_grad()
        total([ours], step).backward()
        backward_alone(plain, step)
        expected = [p.grad for p in plain.parameters()]
        for parameter, value in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, value)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", check.names)
def test_two_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
