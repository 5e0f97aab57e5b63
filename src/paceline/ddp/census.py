"""Which parameters does the module have, compared with when it was wrapped?

Asked before every forward that is synchronised, so the common answer ("the same") must be cheap: it
compares all parameters and submodules by identity, without walking the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from paceline.errors import ParametersChangedError

_requires_grad = attrgetter("requires_grad")


class ParameterCensus:
    """Remembers a module's parameters."""

    def __init__(
        self, module: torch.nn.Module, ignored: set[str], managed: Iterable[torch.Tensor]
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._managed = {id(parameter) for parameter in managed}
        self._frozen = [
            parameter
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and name not in ignored
        ]
        self._names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._count()

    def _count(self) -> None:
        modules = list(self._module.modules())
        self._dicts: list[dict[str, Any]] = [m._parameters for m in modules]
        self._dicts += [m._modules for m in modules]
        self._members = list(self._current_members())

    def _current_members(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))

    def is_unchanged(self) -> bool:
        """Whether nothing was added, removed, exchanged or unfrozen."""
        if any(map(_requires_grad, self._frozen)):
            return False
        current = list(self._current_members())
        return len(current) == len(self._members) and all(map(is_, current, self._members))

    def check_again(self, rank: int) -> bool:
        """Look at a changed module; return whether our parameters are still in it.

        They are not while ``torch.func.functional_call`` runs it with others in their place: such a
        forward is none of our business.

        Raises:
            ParametersChangedError: If there is something new to train.
        """
        unfrozen = {id(parameter) for parameter in self._frozen if parameter.requires_grad}
        new = [
            name
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
            and (name not in self._names or id(parameter) in unfrozen)
            and name not in self._ignored
        ]
        if new:
            raise ParametersChangedError(
                f"Rank {rank}: the module has parameters to train that were not there, or were "
                f"frozen, when it was wrapped: {', '.join(new)}. Their gradients would "
                "not be averaged, and ranks would drift apart. Add or unfreeze parameters first, "
                "then wrap the module in a new DistributedDataParallel (and give the optimizer the "
                "new parameters).",
                rank=rank,
                parameters=new,
            )
        if not any(id(parameter) in self._managed for parameter in self._module.parameters()):
            return False
        self._count()
        return True
