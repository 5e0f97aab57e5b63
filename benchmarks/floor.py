"""The least that a reducer in Python can cost: a hook per parameter that does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.variants import Variant


class HooksOnly(nn.Module):
    """Calls an empty Python function when a gradient has been accumulated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # The nodes are kept: a parameter refers to its own only weakly.
        self._nodes = [_accumulate_node(parameter) for parameter in module.parameters()]
        for node in self._nodes:
            node.register_hook(_nothing)

    def forward(self, *inputs: Any) -> Any:
        """Run the module."""
        return self.module(*inputs)


def _accumulate_node(parameter: torch.Tensor) -> Any:
    grad_fn = parameter.view_as(parameter).grad_fn
    assert grad_fn is not None
    return grad_fn.next_functions[0][0]


def _nothing(*_: Any) -> None:
    return None


HOOKS_ONLY = Variant("empty hooks", "benchmarks.floor:HooksOnly")
