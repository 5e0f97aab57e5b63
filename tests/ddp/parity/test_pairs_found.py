"""What the pairs (test_pairs.py) have brought to light, each in its smallest form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError, DesynchronizedError, SharedParametersError
from paceline.torch_private.modules import MixedPrecisionConfig
from tests.ddp.checks import Checks, Outcomes, assert_passed
from tests.ddp.compare import TorchDDP, assert_close, batch, gradients, reference_gradients
from tests.ddp.models import mlp
from tests.ddp.parity.pair_cases import Training
from tests.ddp.parity.test_pairs import USUAL
from tests.ddp.parity.test_sharing import loss_of, nets, total

check = Checks()
MIXED = {"precision": "mixed"}
IN_BACKWARD = {"optimizer": "in backward"}


@check.each(
    {"wrappers": "siblings"},
    {"weighted": True, "wrappers": "nested"},  # the inner wrapper did not know of the weights
    MIXED | {"forwards": 2},  # the second forward made autograd forget the hooks of the first
    MIXED | {"sparse": True, "no_sync": True},  # local gradients were dropped
    MIXED | IN_BACKWARD | {"no_sync": True},  # local gradients came back after the step
    IN_BACKWARD | {"sparse": True},  # stepped with the local gradient, if the bucket was quick
    IN_BACKWARD | {"delayed": True},  # stepped with the local gradient
    IN_BACKWARD | {"no_sync": True, "wrappers": "nested"},  # the inner wrapper stepped too early
    {"join": True, "forwards": 2},  # joined ranks mirrored two backwards
)
def right_numbers(case: dict[str, Any]) -> None:
    for transport in ("shm", "c10d"):
        Training(USUAL | case | {"transport": transport}).run()


@check
def a_forward_without_gradients_between_forward_and_backward() -> None:
    """With mixed precision it freed the low-precision data that the backward needs."""
    ddp = DDP(mlp(4), mixed_precision=MixedPrecisionConfig(param_dtype=torch.float64))
    for step in range(2):
        ddp.zero_grad()
        loss = ddp(batch(step)).square().mean()
        with torch.no_grad():
            ddp(batch(50))
        loss.backward()
        expected = reference_gradients(
            ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
        )
        assert_close(gradients(ddp), expected)


@check
def an_evaluation_inside_of_join() -> None:
    """Joined ranks waited for its backward."""
    ddp = DDP(mlp(4))
    with ddp.join():
        for step in range(3 - dist.get_rank()):
            with torch.no_grad():
                ddp(batch(50 + step))
            ddp(batch(step)).square().mean().backward()
    assert ddp.stats().steps == 3


@check
def two_wrappers_in_one_backward_while_a_rank_has_joined() -> None:
    """The rank without inputs learns of it, too."""
    wrappers = [DDP(model) for model in nets()]

    def train() -> None:
        with Join(wrappers):
            for step in range(0 if dist.get_rank() == 1 else 2):
                total(wrappers, step).backward()

    with pytest.raises(DesynchronizedError, match="second wrapper"):
        train()


@check
def two_wrappers_with_a_backward_each_under_join() -> None:
    models = nets()
    plain = copy.deepcopy(models)
    wrappers = [DDP(model) for model in models]
    with Join(wrappers):
        for step in range(2 - dist.get_rank()):
            for number, wrapper in enumerate(wrappers):
                models.zero_grad()
                plain.zero_grad()
                loss_of(wrapper, number, step).backward()
                for rank in range(2 - step):
                    (loss_of(plain[number], number, step, rank) / 2).backward()
                assert_close(gradients(models), gradients(plain))


@check
def join_may_be_switched_off_for_what_it_cannot_do() -> None:
    inner = DDP(nn.Linear(4, 4))
    outer = DDP(nn.Sequential(inner, nn.Linear(4, 4)))
    with pytest.raises(ConfigurationError, match="wrapper inside"):
        outer.join()
    with outer.join(enable=False):
        outer(batch(0)).mean().backward()


@check
def weights_cannot_reach_torchs_wrapper_inside() -> None:
    outer = DDP(nn.Sequential(TorchDDP(nn.Linear(4, 4)), nn.Linear(4, 4)))
    with pytest.raises(ConfigurationError, match=r"torch\.nn\.parallel"), outer.weighted(2.0):
        pass


@check
def a_shared_parameter_that_one_wrapper_delays() -> None:
    models = nets()
    shared = models[0].shared
    delaying = DDP(
        models[0],
        delay_all_reduce_named_params=[("shared.bias", shared.bias)],
        param_to_hook_all_reduce=shared.weight,
    )
    other = DDP(models[1])
    with pytest.raises(SharedParametersError, match="delays its reduction"):
        total([delaying, other], 0).backward()


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return check.run(2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", check.names)
def test_two_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)
