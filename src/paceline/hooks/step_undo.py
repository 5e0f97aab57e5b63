"""The way back from an optimizer's step whose meeting of the ranks has failed.

Used by the optimizers of local SGD, where a collective follows the local step: if it fails, the
step is half done, and cannot be completed without the ranks that are gone. Elastic training asks
for it (``undoes_failed_steps``); it costs a copy of parameters and optimizer in those steps in
which ranks meet, and nothing in the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class StepUndo:
    """Parameters and state of an optimizer, as they are when this is made."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, p.detach().clone()) for p in _parameters(optimizer)]
        self._state = {
            p: {key: _copied(value) for key, value in state.items()}
            for p, state in optimizer.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Go back."""
        for parameter, before in self._parameters:
            parameter.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
