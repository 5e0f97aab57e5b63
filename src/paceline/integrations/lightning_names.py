"""Makes the string ``"paceline"`` a strategy in Lightning's registries.

Lightning has no entry point for strategies (only for callbacks, which come after the strategy was
chosen), and a user should not need an import besides the string. So torch's import, which Lightning
needs, has us watch for four modules (:mod:`paceline.autoload`). Each time one of them is
imported, its registry gets our names, with a function that imports the strategy when it is used.

The watch is a finder on ``sys.meta_path``: one look-up in a dictionary for each module that a
program imports. Nothing of torch and nothing of Lightning is imported here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PACKAGE = "paceline.integrations.lightning"


@dataclass(frozen=True)
class _Registry:
    """Where a registry of Lightning's is, and which class of ours belongs into it."""

    name: str
    module: str
    strategy: str


_REGISTRIES = {
    "lightning.fabric.strategies": _Registry("STRATEGY_REGISTRY", "fabric", "FabricDDPStrategy"),
    "lightning.pytorch.strategies": _Registry("StrategyRegistry", "trainer", "DDPStrategy"),
    "lightning_fabric.strategies": _Registry(
        "STRATEGY_REGISTRY", "standalone_fabric", "FabricDDPStrategy"
    ),
    "pytorch_lightning.strategies": _Registry(
        "StrategyRegistry", "standalone_trainer", "DDPStrategy"
    ),
}

# Lightning's names for its DDP, with ours in the place of 'ddp'.
_VARIANTS: dict[str, dict[str, Any]] = {
    "paceline": {"start_method": "popen"},
    "paceline_spawn": {"start_method": "spawn"},
    "paceline_fork": {"start_method": "fork"},
    "paceline_notebook": {"start_method": "fork"},
    "paceline_find_unused_parameters_true": {
        "start_method": "popen",
        "find_unused_parameters": True,
    },
}


class _Watch(MetaPathFinder):
    """Sees the modules with registries go by, and registers at the end of their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            # On the object: its class stays what others expect of a source file.
            spec.loader.exec_module = partial(_execute, execute)  # type: ignore[method-assign]
        return spec


def _execute(execute: Any, module: ModuleType) -> None:
    execute(module)
    _register(module)


def register_all() -> None:
    """Register with every Lightning that is imported, now or later. A second call does nothing."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])


def _register(module: ModuleType) -> None:
    where = _REGISTRIES[module.__name__]
    registry = getattr(module, where.name, None)
    if registry is None:  # a module that is being imported registers at its end
        return
    make = partial(_make, f"{_PACKAGE}.{where.module}", where.strategy)
    for name, arguments in _VARIANTS.items():
        if name not in registry:
            about = "Paceline's DistributedDataParallel"
            registry.register(name, make, description=about, **arguments)


def _make(module: str, strategy: str, **arguments: Any) -> Any:
    return getattr(importlib.import_module(module), strategy)(**arguments)
