"""What a commit keeps: all that a forward may change before the next step is committed.

Called by :mod:`paceline.elastic.state`. Parameters and optimizers are not kept: nothing changes
them before the step, and the step is what is committed. What is kept is small: buffers, random
generators, settings of the optimizers (a learning rate), schedulers, scalers, and the numbers of
the state itself. What wrappers remember is large for some hooks, and copied only where it changes
(:mod:`paceline.elastic.wrapper_state`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from paceline.elastic.random_state import read_generators, write_generators
from paceline.elastic.wrapper_state import WrapperState
from paceline.torch_private.scaler import forget_step


class Stateful(Protocol):
    """What has a state to be kept: a scheduler, a scaler, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state back."""


class Kept:
    """The last commit, as far as it is not in parameters and optimizers.

    Args:
        modules: Whose buffers are kept.
        optimizers: Whose settings are kept.
        parts: What else has a state, by name.
        wrappers: What Paceline's wrappers remember.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        parts: Mapping[str, Stateful],
        wrappers: WrapperState,
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._parts = parts
        self._wrappers = wrappers
        self.look_again()

    def look_again(self) -> None:
        """Find the buffers: modules have been changed, or a new epoch begins."""
        self._buffers = [b for module in self._modules for b in module.buffers()]
        self._copies = [torch.empty_like(b) for b in self._buffers]

    def keep(self, values: dict[str, Any]) -> None:
        """Keep all of it as it is now."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)
        self._wrappers.keep()
        self._values = dict(values)
        self._generators = read_generators()
        self._settings = [
            [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
            for each in self._optimizers
        ]
        self._states = {name: copy.deepcopy(p.state_dict()) for name, p in self._parts.items()}

    def put_back(self) -> dict[str, Any]:
        """Make everything as it was at the commit; return the values."""
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._copies)
        self._wrappers.put_back()
        write_generators(self._generators)
        for optimizer, groups in zip(self._optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._states[name]))
            forget_step(part)
        return dict(self._values)
