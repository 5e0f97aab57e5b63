"""Which parameters does the module have, compared with when it was wrapped?

Asked before every forward that is synchronised, so the common answer ("the same") must be cheap: it
compares all parameters and submodules by identity, without walking the module.

[Note: lent tensors] ``torch.func.functional_call`` puts tensors in the place of parameters for one
forward. They may be made from ours (``p * 1.0``): then gradients arrive at our parameters and are
to be averaged. Or they may be others: then such a forward does not concern us. Only the graph
of the forward's output can tell, so the wrapper asks it. A module keeps nothing but
``nn.Parameter`` in the place of a parameter for longer than that: a new one that is to be trained
is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from paceline.errors import ParametersChangedError
from paceline.torch_private.autograd import is_inside_functional_call

_requires_grad = attrgetter("requires_grad")


class ModuleWatch:
    """Notices when a module has other parameters than before."""

    def __init__(
        self, module: torch.nn.Module, ignored: set[str], managed: Iterable[torch.Tensor]
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._managed = {id(parameter) for parameter in managed}
        self._trained = {id(p): p for _, p in self._named() if p.requires_grad}
        self._remember()

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            if name not in self._ignored:
                yield name, parameter

    def _remember(self) -> None:
        modules = list(self._module.modules())
        self._dicts: list[dict[str, Any]] = [m._parameters for m in modules]
        self._dicts += [m._modules for m in modules]
        self._members = list(self._current_members())
        self._frozen = [parameter for _, parameter in self._named() if not parameter.requires_grad]

    def _current_members(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))

    def is_unchanged(self) -> bool:
        """Whether nothing was added, removed, exchanged or unfrozen."""
        if any(map(_requires_grad, self._frozen)):
            return False
        current = list(self._current_members())
        return len(current) == len(self._members) and all(map(is_, current, self._members))

    def look_again(self, rank: int) -> bool:
        """Look at a changed module; return whether it runs with its own parameters.

        If not, the graph must tell whether a forward leads to ours ([Note: lent tensors]).

        Raises:
            ParametersChangedError: If there is something new to train.
        """
        own = [isinstance(p, torch.nn.Parameter) for p in self._module.parameters()]
        is_lent = is_inside_functional_call() or not all(own)
        new = self._unknown(is_lent=is_lent)
        if new:
            raise _changed(new, rank)
        if is_lent or not any(id(p) in self._managed for p in self._module.parameters()):
            return False
        self._remember()
        return True

    def _unknown(self, *, is_lent: bool) -> list[str]:
        """Name what is trained now and was not when the module was wrapped."""
        unfrozen = {id(parameter) for parameter in self._frozen if parameter.requires_grad}
        return [
            name
            for name, parameter in self._named()
            if parameter.requires_grad
            and id(parameter) not in self._trained
            and (not is_lent or id(parameter) in unfrozen)
        ]


def _changed(names: list[str], rank: int) -> ParametersChangedError:
    return ParametersChangedError(
        f"Rank {rank}: the module has parameters to train that were not there, or were frozen, "
        f"when it was wrapped: {', '.join(names)}. Their gradients would not be averaged, and "
        "ranks would drift apart. They were added or unfrozen, or exchanged for new ones under the "
        "same name, as load_state_dict(assign=True), `module.weight = nn.Parameter(...)` and "
        "weight_norm do. Do that first, then wrap the module in a new DistributedDataParallel (and "
        "give the optimizer the new parameters); load_state_dict without assign=True copies into "
        "the parameters that are there.",
        rank=rank,
        parameters=names,
    )
