"""What a commit keeps: all that a forward may change before the next step is committed.

Called by :mod:`paceline.elastic.state`. Parameters and optimizers are not kept: nothing changes
them before the step, and the step is what is committed. What is kept is small: buffers, random
generators, settings of the optimizers (a learning rate), schedulers, scalers, and the numbers of
the state itself. What wrappers remember is large for some hooks, and copied only where it changes
(:mod:`paceline.elastic.commit.wrapper_state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from paceline.elastic.commit.plain_copy import copied_state, copy_plain
from paceline.elastic.commit.random_state import KeptGenerators
from paceline.elastic.commit.wrapper_state import WrapperState
from paceline.torch_private.modules import own_buffers
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
        self._optimizers = optimizers
        self._parts = parts
        self._wrappers = wrappers
        self._buffers = _Buffers(modules)
        self._generators = KeptGenerators()

    def look_again(self) -> None:
        """Modules may have got other buffers."""
        self._buffers.find()

    def keep(self, values: dict[str, Any]) -> None:
        """Keep all of it as it is now; ``values`` are not to be changed afterwards."""
        if self._buffers.are_there:
            self._buffers.keep()
        self._wrappers.keep()
        self._values = values
        self._generators.keep()
        groups = [each.param_groups for each in self._optimizers]
        self._settings = copy_plain(groups, _NOT_SETTINGS, _copied)
        self._states = copied_state({name: p.state_dict() for name, p in self._parts.items()})

    def put_back(self) -> dict[str, Any]:
        """Make everything as it was at the commit; return the values."""
        self._buffers.put_back()
        self._wrappers.put_back()
        self._generators.put_back()
        for optimizer, groups in zip(self._optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                _put_back_settings(group, settings)
        for name, part in self._parts.items():
            part.load_state_dict(copied_state(self._states[name]))
            forget_step(part)
        return dict(self._values)


_NOT_SETTINGS = frozenset(("params", "param_names"))


def _copied(value: Any) -> Any:
    """A learning rate may be a tensor, which schedulers change in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put_back_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, value in settings.items():
            now = group.get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                now.copy_(value)
            else:
                group[name] = copy_plain(value, _NOT_SETTINGS, _copied)


class _Buffers:
    """All buffers of some modules, and copies of them.

    A forward may put another tensor in the place of a buffer (``self.mean = 0.9 * self.mean + x``),
    so they are looked up again at each commit.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules
        self.find()

    def find(self) -> None:
        """See which there are."""
        every = {id(each): each for module in self._modules for each in module.modules()}
        self._places = [
            (each, own, name)
            for each in every.values()
            for own in (own_buffers(each),)
            for name, buffer in own.items()
            if buffer is not None
        ]
        self._found = self._look_up()
        self._copies = [torch.empty_like(buffer) for buffer in self._found]

    def _look_up(self) -> list[Any]:
        return [own.get(name) for _, own, name in self._places]

    def _are_same(self, found: list[Any]) -> bool:
        return list(map(id, found)) == list(map(id, self._found))

    @property
    def are_there(self) -> bool:
        """Whether there is any: to switch gradients off and on takes longer than to ask."""
        return bool(self._places)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy them as they are now."""
        if not self._are_same(self._look_up()):
            self.find()
        torch._foreach_copy_(self._copies, self._found)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were, in the tensors that they were in."""
        for (module, own, name), then in zip(self._places, self._found, strict=True):
            if own.get(name) is not then:
                setattr(module, name, then)
        if self._places:
            torch._foreach_copy_(self._found, self._copies)
