"""torch's own DistributedDataParallel on parameters that a wrapper of ours reduces as well.

Both would divide the same gradient by the number of ranks. torch's wrapper inside of ours is fine:
what it averages we leave to it (parameters.py). Around ours, it is refused: one of the two is
enough. Beside ours, over the same layers, it is right as two of ours are ([Note: shared parameters]
in sharing.py), as long as it does not lend out views of its buckets.

torch keeps no list of its wrappers. We are told of each that is made, by a hook on the registration
of submodules, from our first wrapper on; those that were there before are looked for once.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from paceline.ddp.reduce.reducer import Reducer
from paceline.errors import ForeignWrapperError
from paceline.torch_private.modules import TorchDDP


class _Known:
    """All of torch's wrappers in this process; ``count`` grows with each."""

    def __init__(self, ours: type[TorchDDP]) -> None:
        self._ours = ours
        self.count = 0
        self.wrappers: weakref.WeakSet[TorchDDP] = weakref.WeakSet()
        for thing in gc.get_objects():
            # Not isinstance: it would ask lazy objects for their class, and abstract classes.
            if TorchDDP in type(thing).__mro__ and "module" in thing.__dict__.get("_modules", ()):
                self._note(thing)
        register_module_module_registration_hook(self._on_registration)

    def _on_registration(self, owner: Any, name: str, _: Any) -> None:
        if name == "module" and TorchDDP in type(owner).__mro__:
            self._note(owner)

    def _note(self, wrapper: TorchDDP) -> None:
        if self._ours not in type(wrapper).__mro__:
            self.count += 1
            self.wrappers.add(wrapper)


_known: _Known | None = None


class ForeignGuard:
    """Looks after one wrapper of ours: a comparison of two numbers, until there is a new one.

    ``ours`` is our class: all other wrappers are foreign.
    """

    def __init__(self, wrapper: TorchDDP, reducer: Reducer, ours: type[TorchDDP]) -> None:
        global _known
        if _known is None:
            _known = _Known(ours)
        self._wrapper = weakref.ref(wrapper)
        self._reducer = reducer
        self._seen = 0

    def check(self) -> None:
        """Look at torch's wrappers that are new since the last time.

        Raises:
            ForeignWrapperError: If one of them averages parameters of ours as well.
        """
        is_beside = bool(self._reducer.sharing.foreign)  # or was: it may be gone
        if _known is not None and (is_beside or _known.count != self._seen):
            count = _known.count
            self._look(_known)
            self._seen = count

    def _look(self, known: _Known) -> None:
        wrapper = self._wrapper()
        mine = {id(parameter): i for i, parameter in enumerate(self._reducer.parameters)}
        beside: set[int] = set()
        for foreign in list(known.wrappers):
            shared = [mine[key] for key in _reduced_by(foreign) if key in mine]
            if not shared:
                continue
            if any(module is wrapper for module in foreign.modules()):
                raise self._error("around", foreign, shared)
            if foreign.gradient_as_bucket_view:
                raise self._error("beside", foreign, shared)
            beside.update(shared)
        self._reducer.sharing.share_with_foreign(tuple(sorted(beside)))

    def _error(self, where: str, foreign: TorchDDP, shared: list[int]) -> ForeignWrapperError:
        names = [self._reducer.specs[index].name for index in shared]
        kind = f"{type(foreign).__module__}.{type(foreign).__qualname__}"
        remedy = (
            "Wrap the model once: give the framework the plain module, or switch its own wrapping "
            "off (or let Paceline take torch's place there)."
            if where == "around"
            else "Wrap both models with Paceline, or construct torch's with "
            "gradient_as_bucket_view=False."
        )
        return ForeignWrapperError(
            f"Rank {self._reducer.rank}: a {kind}, which is torch's and not ours, is "
            f"{where} this wrapper and averages {len(names)} of its parameters as well "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). Gradients would be "
            f"divided by the number of ranks twice. {remedy}",
            rank=self._reducer.rank,
            parameters=names,
        )


def _reduced_by(foreign: TorchDDP) -> list[int]:
    """Return the ids of the parameters that a wrapper of torch's averages."""
    ignored = foreign.parameters_to_ignore
    parameters: list[tuple[str, torch.Tensor]] = list(foreign.module.named_parameters())
    return [id(p) for name, p in parameters if p.requires_grad and name not in ignored]
