"""Floors: wrappers that do one thing every wrapper does, and reduce nothing.

For ``--also`` of ``paceline bench ddp``, and for ``hot_path``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.cli.bench.harness import malloc
from paceline.cli.bench.harness.contenders import Contender


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


class MeetOnly(nn.Module):
    """Ranks wait for each other once, after the backward, in shared memory; freed memory is kept.

    One hook, no copy, no sum: what a step costs whose ranks depend on each other, with malloc set
    as Paceline sets it and the scheduler as it is.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        malloc.keep_memory()
        self.module = module
        ranks = dist.get_process_group_ranks(process_group)
        self._group = dist.new_group(ranks, backend="paceline", use_local_synchronization=True)
        self._node = _accumulate_node(next(module.parameters()))
        self._node.register_hook(self._at_the_end_meet)

    def forward(self, *inputs: Any) -> Any:
        """Run the module."""
        return self.module(*inputs)

    def _at_the_end_meet(self, *_: Any) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: dist.barrier(self._group))


def _accumulate_node(parameter: torch.Tensor) -> Any:
    grad_fn = parameter.view_as(parameter).grad_fn
    assert grad_fn is not None
    return grad_fn.next_functions[0][0]


def _nothing(*_: Any) -> None:
    return None


HOOKS_ONLY = Contender("empty hooks", "benchmarks.floor:HooksOnly")
