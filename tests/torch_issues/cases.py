"""The situations that issues of torch's tracker describe; each runs with torch's wrapper and ours.

A case takes the wrapper's class, and returns what the issue is about: gradients, a text, a number.
The issues are named in ``docs/torch-issues.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.torch_issues.cases_of_copies import (
    converted_after_wrapping,
    deep_copied,
    gradients_share_the_buckets_memory,
    pickled,
    reloaded_by_assignment,
    saved_whole,
    through_the_module,
)
from tests.torch_issues.comparing import (
    Wrap,
    batch,
    gradients,
    is_close,
    mean_over_ranks,
    mine,
    net,
    ranks_are_equal,
    seeded,
)

# --- buffers -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A buffer takes part in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), 2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.scale


def two_forwards_with_a_buffer(wrap: Wrap) -> Any:
    model = wrap(seeded(Scaled))
    (model(mine()).sum() + model(mine() * 2).pow(2).sum()).backward()
    wanted = mean_over_ranks(lambda m, r: m(batch(r)).sum() + m(batch(r) * 2).pow(2).sum(), Scaled)
    return is_close(gradients(model), wanted)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def real_and_fake(model: nn.Module, rank: int) -> torch.Tensor:
    """A discriminator's loss: of two forwards; each changes the buffers."""
    real, fake = model(batch(rank)), model(batch(rank + 10) * 3 + 1)
    return F.softplus(-real).sum() + F.softplus(fake).pow(2).sum()


def two_forwards_with_batch_norm(wrap: Wrap) -> Any:
    model = wrap(seeded(with_batch_norm))
    for _ in range(2):
        model.zero_grad()
        real_and_fake(model, dist.get_rank()).backward()
    return is_close(gradients(model), mean_over_ranks(real_and_fake, with_batch_norm))


def batch_norm_in_eval_called_again(wrap: Wrap) -> Any:
    model = wrap(seeded(with_batch_norm)).eval()
    first = model(mine().requires_grad_()).pow(2).sum()
    model(mine() * 3)
    first.backward()
    wanted = mean_over_ranks(lambda m, r: m.eval()(batch(r)).pow(2).sum(), with_batch_norm)
    return is_close(gradients(model), wanted)


# --- torch.autograd.grad, higher orders ---------------------------------------------------------


def penalty(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    inputs = inputs.clone().requires_grad_()
    output = model(inputs).sum()
    (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
    return output + (slope.norm(dim=1) - 1).pow(2).sum()


def gradient_penalty(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    penalty(model, mine()).backward()
    return is_close(gradients(model), mean_over_ranks(lambda m, r: penalty(m, batch(r)), net))


def grad_of_parameters(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    found = torch.autograd.grad(model(mine()).sum(), list(model.parameters()))
    wanted = mean_over_ranks(lambda m, r: m(batch(r)).sum(), net)
    return is_close(found, wanted)


def backward_with_create_graph(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    model(mine()).pow(2).sum().backward(create_graph=True)
    found = [p.grad.detach().clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return is_close(found, mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net))


# --- accumulation ------------------------------------------------------------------------------


def always_in_no_sync(wrap: Wrap) -> Any:
    """The forward under ``no_sync``, the backward outside: nothing is ever averaged."""
    model = wrap(seeded(net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        with model.no_sync():
            loss = model(mine()).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ranks_are_equal(model)


def only_backward_in_no_sync(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    loss = model(mine()).pow(2).sum()
    with model.no_sync():
        loss.backward()
    return is_close(gradients(model), mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net))


def unequal_batches(wrap: Wrap) -> Any:
    """Rank 0 has two samples, rank 1 has six; the mean over all eight is wanted."""
    model, rows = wrap(seeded(net)), 2 + 4 * dist.get_rank()
    if hasattr(model, "weighted"):
        with model.weighted(rows):
            model(mine(rows)).pow(2).mean().backward()
    else:
        model(mine(rows)).pow(2).mean().backward()
    one = seeded(net)
    one(torch.cat([batch(0, 2), batch(1, 6)])).pow(2).mean().backward()
    return is_close(gradients(model), gradients(one))


def unequal_batches_accumulated(wrap: Wrap) -> Any:
    """Two micro-batches a rank, each with another number of samples."""
    model, rank = wrap(seeded(net)), dist.get_rank()
    sizes = [[1, 3], [4, 2]]
    for step, rows in enumerate(sizes[rank]):
        inputs = batch(10 * rank + step, rows)
        local = model.no_sync() if step == 0 else nullcontext()
        if hasattr(model, "weighted"):
            total = sum(sizes[rank])
            with local, model.weighted(total):
                (model(inputs).pow(2).sum() / total).backward()
        else:
            with local:
                (model(inputs).pow(2).mean() / 2).backward()
    one = seeded(net)
    parts = [batch(10 * r + s, sizes[r][s]) for r in range(2) for s in range(2)]
    one(torch.cat(parts)).pow(2).mean().backward()
    return is_close(gradients(model), gradients(one))


# --- names in checkpoints ------------------------------------------------------------------------


def saved_for_one_process(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    has_names = hasattr(model, "unwrapped_state_dict")
    state = model.unwrapped_state_dict() if has_names else model.state_dict()
    one = net()
    one.load_state_dict(state)
    return torch.equal(one[0].weight, model.module[0].weight)


def loaded_from_one_process(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    other = net()
    model.load_state_dict(other.state_dict())
    return torch.equal(other[0].weight, model.module[0].weight)


def names_of_parameters(wrap: Wrap) -> Any:
    """Names by which a program chooses parameters: weight decay, layers to freeze, a checkpoint."""
    model = wrap(seeded(net))
    plain = [name for name, _ in net().named_parameters()]
    has_names = hasattr(model, "unwrapped_state_dict")
    names = list(model.unwrapped_state_dict()) if has_names else list(model.state_dict())
    prefixed = [name for name, _ in model.named_parameters()] == [f"module.{n}" for n in plain]
    return f"named_parameters has the prefix: {prefixed}; the state has not: {names == plain}"


# --- freezing ------------------------------------------------------------------------------------


def unfrozen_after_wrapping(wrap: Wrap) -> Any:
    inner = seeded(net)
    inner[0].requires_grad_(False)
    model = wrap(inner)
    inner[0].requires_grad_(True)
    model(mine()).pow(2).sum().backward()
    return is_close(gradients(model), mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net))


def frozen_after_wrapping(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    model.module[0].requires_grad_(False)
    for _ in range(2):
        model.zero_grad()
        model(mine()).pow(2).sum().backward()
    wanted = mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net)
    return is_close(gradients(model)[2:], wanted[2:])


def frozen_and_unfrozen_again(wrap: Wrap) -> Any:
    model = wrap(seeded(net), find_unused_parameters=True)
    for is_frozen in (True, False):
        model.module[0].requires_grad_(not is_frozen)
        model.zero_grad()
        model(mine()).pow(2).sum().backward()
    return is_close(gradients(model), mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net))


def nothing_to_train(wrap: Wrap) -> Any:
    wrap(seeded(net).requires_grad_(False))
    return True


# --- unused parameters ---------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.used(inputs)


class TwoOutputs(Branches):
    def forward(self, inputs: torch.Tensor) -> Any:
        return self.used(inputs), self.spare(inputs)


@dataclass
class Output:
    loss: torch.Tensor


class InADataclass(Branches):
    def forward(self, inputs: torch.Tensor) -> Any:
        return Output(self.used(inputs).pow(2).sum())


class InADict(Branches):
    def forward(self, inputs: torch.Tensor) -> Any:
        return {"loss": [self.used(inputs).pow(2).sum()]}


def unused_parameter(wrap: Wrap) -> Any:
    model = wrap(seeded(Branches))
    model(mine()).sum().backward()
    said = "the first step said nothing"
    try:
        model(mine()).sum().backward()
    except RuntimeError as error:
        return f"{said}; then {error}"
    return said


def output_without_loss(wrap: Wrap) -> Any:
    model = wrap(seeded(TwoOutputs), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(mine())[0].pow(2).sum().backward()
    wanted = mean_over_ranks(lambda m, r: m(batch(r))[0].pow(2).sum(), TwoOutputs)
    *used, weight, bias = gradients(model)
    is_left_alone = all(g is None or not g.any() for g in (weight, bias))
    return is_left_alone and is_close(used, wanted[:2])


def dataclass_output(wrap: Wrap) -> Any:
    model = wrap(seeded(InADataclass), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(mine()).loss.backward()
    wanted = mean_over_ranks(lambda m, r: m(batch(r)).loss, InADataclass)
    return is_close(gradients(model), wanted)


def dict_output(wrap: Wrap) -> Any:
    model = wrap(seeded(InADict), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(mine())["loss"][0].backward()
    wanted = mean_over_ranks(lambda m, r: m(batch(r))["loss"][0], InADict)
    return is_close(gradients(model), wanted)


# --- graphs that use a layer twice ---------------------------------------------------------------


class CheckpointedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        for _ in range(2):
            inputs = checkpoint(self.layer, inputs, use_reentrant=True)
        return inputs


def checkpointed_twice(wrap: Wrap) -> Any:
    model = wrap(seeded(CheckpointedTwice))
    for _ in range(2):
        model.zero_grad()
        model(mine()).pow(2).sum().backward()
    wanted = mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), CheckpointedTwice)
    return is_close(gradients(model), wanted)


def backward_twice(wrap: Wrap) -> Any:
    """Two losses of one forward, one backward each."""
    model = wrap(seeded(net))
    output = model(mine())
    output.sum().backward(retain_graph=True)
    output.pow(2).sum().backward()
    wanted = mean_over_ranks(lambda m, r: (y := m(batch(r))).sum() + y.pow(2).sum(), net)
    return is_close(gradients(model), wanted)


# --- others --------------------------------------------------------------------------------------


def sync_batch_norm_on_cpu(wrap: Wrap) -> Any:
    import paceline

    ours = wrap is paceline.DistributedDataParallel
    convert = (paceline.nn if ours else nn).SyncBatchNorm.convert_sync_batchnorm
    model = wrap(convert(seeded(with_batch_norm).double()))
    model(mine().double()).pow(3).sum().backward()
    one = seeded(with_batch_norm).double()
    one(torch.cat([batch(0), batch(1)]).double()).pow(3).sum().div(2).backward()
    return is_close(gradients(model), gradients(one))


CASES: list[Callable[[Wrap], Any]] = [
    two_forwards_with_a_buffer,
    two_forwards_with_batch_norm,
    batch_norm_in_eval_called_again,
    gradient_penalty,
    grad_of_parameters,
    backward_with_create_graph,
    always_in_no_sync,
    only_backward_in_no_sync,
    unequal_batches,
    unequal_batches_accumulated,
    saved_for_one_process,
    loaded_from_one_process,
    names_of_parameters,
    unfrozen_after_wrapping,
    frozen_after_wrapping,
    frozen_and_unfrozen_again,
    nothing_to_train,
    unused_parameter,
    output_without_loss,
    dataclass_output,
    dict_output,
    checkpointed_twice,
    backward_twice,
    through_the_module,
    converted_after_wrapping,
    reloaded_by_assignment,
    pickled,
    saved_whole,
    deep_copied,
    gradients_share_the_buckets_memory,
    sync_batch_norm_on_cpu,
]
