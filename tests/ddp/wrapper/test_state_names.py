"""Names in checkpoints: with the wrapper's prefix, and without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import run_ranks


class HasAModule(nn.Module):
    """Its child's name is the wrapper's prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def load_each() -> None:
    for make in (lambda: nn.Linear(2, 2), HasAModule):
        model, other = paceline.DistributedDataParallel(make()), make()
        model.load_state_dict(other.state_dict())
        check_equal(model, other)
        wrapped = {f"module.{name}": value + 1 for name, value in other.state_dict().items()}
        model.load_state_dict(wrapped)
        assert all(torch.equal(wrapped[name], value) for name, value in model.state_dict().items())
        third = make()
        third.load_state_dict(model.unwrapped_state_dict())
        check_equal(model, third)


def check_equal(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def missing_names_are_errors() -> None:
    model = paceline.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        model.load_state_dict({"weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "module.weight"'):
        model.load_state_dict({})
    told = model.load_state_dict({"weight": torch.zeros(2, 2)}, strict=False)
    assert told.missing_keys == ["bias"]


def check_all() -> None:
    load_each()
    missing_names_are_errors()


def test_both_kinds_of_names() -> None:
    run_ranks(1, check_all)
