"""``patch_torch``: torch's names become ours, for scripts that cannot be edited.

Called by users, and by :mod:`paceline.autoload` when ``PACELINE_PATCH=1`` is set. What of ours
builds on torch's classes has bound them at its own import, so it never finds itself here. There
is no state: a name is patched if it means our class.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch

from paceline.ddp import DistributedDataParallel
from paceline.nn import SyncBatchNorm
from paceline.printable import listed
from paceline.torch_private.modules import TorchDDP, TorchSyncBatchNorm

# Not DataParallel: only a script that asks for CPU devices gains by ours, and torch's refuses that.
_PLACES: dict[type[torch.nn.Module], tuple[ModuleType, ...]] = {
    DistributedDataParallel: (torch.nn.parallel, torch.nn.parallel.distributed),
    SyncBatchNorm: (torch.nn, torch.nn.modules, torch.nn.modules.batchnorm),
}
_ORIGINALS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    DistributedDataParallel: TorchDDP,
    SyncBatchNorm: TorchSyncBatchNorm,
}
# These know both classes, and ask with isinstance only.
_INDIFFERENT = ("torch", "paceline")


@dataclass(frozen=True)
class TorchPatch:
    """What one call of :func:`patch_torch` did; as a context manager it is undone at the end.

    Attributes:
        changed: The names that mean our classes since this call.
        bound_early: Names in modules that were imported before, which still mean torch's.
    """

    changed: tuple[str, ...]
    bound_early: tuple[str, ...] = field(default=())

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self.changed)

    def __str__(self) -> str:
        lines = [f"{name} is Paceline's" for name in self.changed]
        lines += [f"{name} is still torch's" for name in self.bound_early]
        return "\n".join(lines) or "nothing to change"


def patch_torch() -> TorchPatch:
    """Let torch's names mean Paceline's classes, in code that looks them up from now on.

    ``torch.nn.parallel.DistributedDataParallel`` and ``torch.nn.SyncBatchNorm``, wherever torch has
    them. A second call changes nothing. With ``PACELINE_PATCH=1`` in the environment it happens at
    the end of torch's import, before any other module can bind a name.

    Returns:
        What was changed. Print it, or use it in a ``with`` statement that undoes it.

    Example::

        import paceline
        paceline.patch_torch()
        import the_program  # builds torch.nn.parallel.DistributedDataParallel: ours
    """
    changed = []
    for ours, modules in _PLACES.items():
        for module in modules:
            if vars(module).get(ours.__name__) is _ORIGINALS[ours]:
                setattr(module, ours.__name__, ours)
                changed.append(f"{module.__name__}.{ours.__name__}")
    patch = TorchPatch(tuple(changed), tuple(sorted(_bound_early())))
    if patch.bound_early and patch.changed:
        _warn(patch.bound_early)
    return patch


def unpatch_torch() -> tuple[str, ...]:
    """Give torch's names back to torch. Wrappers that exist keep their class.

    Returns:
        The names that changed.
    """
    places = [(m, ours) for ours, modules in _PLACES.items() for m in modules]
    names = [f"{module.__name__}.{ours.__name__}" for module, ours in places]
    return _restore(tuple(names))


def _restore(names: tuple[str, ...]) -> tuple[str, ...]:
    """Restore those that still mean our classes: somebody may have patched them after us."""
    restored = []
    for ours, modules in _PLACES.items():
        for module in modules:
            name = f"{module.__name__}.{ours.__name__}"
            if name in names and vars(module).get(ours.__name__) is ours:
                setattr(module, ours.__name__, _ORIGINALS[ours])
                restored.append(name)
    return tuple(restored)


def _bound_early() -> Iterator[str]:
    """Find modules that will go on with torch's classes, by name or as a base of their own."""
    originals = tuple(_ORIGINALS.values())
    for module in list(sys.modules.values()):
        # By identity: lazy objects would import what they stand for when asked for their class.
        if not _is_indifferent(getattr(module, "__name__", "torch")):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if any(value is original for original in originals):
                    yield f"{module.__name__}.{name}"
    for ours, original in _ORIGINALS.items():
        for derived in original.__subclasses__():
            if derived is not ours and not _is_indifferent(derived.__module__):
                yield f"{derived.__module__}.{derived.__qualname__}"


def _is_indifferent(module_name: str) -> bool:
    return module_name.partition(".")[0] in _INDIFFERENT


def _warn(names: tuple[str, ...]) -> None:
    warnings.warn(
        f"patch_torch() came after these were bound to torch's classes, and they stay torch's: "
        f"{listed(names, 8)}. Call paceline.patch_torch() before you import them, or start the "
        "program with PACELINE_PATCH=1 in its environment.",
        stacklevel=3,
    )
