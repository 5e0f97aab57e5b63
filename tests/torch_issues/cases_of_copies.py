"""Issues about modules that are used past their wrapper, converted, reloaded, pickled or copied."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch

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


def through_the_module(wrap: Wrap) -> Any:
    """A method of the inner module, as ``ddp.module.f1(x)``; the replicas drift apart."""
    model = wrap(seeded(net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        (model if step == 0 else model.module)(mine()).pow(2).sum().backward()
        optimizer.step()
    return ranks_are_equal(model)


def converted_after_wrapping(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    model.double()
    model(mine().double()).pow(2).sum().backward()
    model.zero_grad()
    model(mine().double()).pow(2).sum().backward()
    wanted = mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net)
    return is_close([g.float() for g in gradients(model)], wanted)  # type: ignore[union-attr]


def reloaded_by_assignment(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model(mine()).pow(2).sum().backward()
    return is_close(gradients(model), mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net))


def pickled(wrap: Wrap) -> Any:
    return trains_as_one_process(pickle.loads(pickle.dumps(wrap(seeded(net)))))


def saved_whole(wrap: Wrap) -> Any:
    file = io.BytesIO()
    torch.save(wrap(seeded(net)), file)
    file.seek(0)
    return trains_as_one_process(torch.load(file, weights_only=False))


def deep_copied(wrap: Wrap) -> Any:
    return trains_as_one_process(copy.deepcopy(wrap(seeded(net))))


def trains_as_one_process(model: Any) -> bool:
    model(mine()).pow(2).sum().backward()
    return is_close(gradients(model), mean_over_ranks(lambda m, r: m(batch(r)).pow(2).sum(), net))


def gradients_share_the_buckets_memory(wrap: Wrap) -> Any:
    model = wrap(seeded(net))
    for _ in range(3):
        model.zero_grad()
        model(mine()).sum().backward()
    first, *others = [p.grad.untyped_storage().data_ptr() for p in model.parameters()]
    return all(other == first for other in others)
