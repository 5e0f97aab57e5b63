"""Lightning Fabric and Trainer: ``strategy="paceline"``.

Lightning knows the name without an import of this package
(:mod:`paceline.integrations.lightning_names`). Whoever wants other settings makes the object:
``Trainer(strategy=DDPStrategy(nonfinite="raise"))``, ``Fabric(strategy=FabricDDPStrategy(...))``.
These two are for ``import lightning``; ``pytorch_lightning`` and ``lightning_fabric`` have the
same strings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.integrations.lightning_names import register_all

if TYPE_CHECKING:
    from paceline.integrations.lightning.fabric import FabricDDPStrategy
    from paceline.integrations.lightning.trainer import DDPStrategy

__all__ = ["DDPStrategy", "FabricDDPStrategy"]

register_all()


def __getattr__(name: str) -> Any:
    # Apart, because Fabric's users need not wait for the import of the Trainer.
    if name == "FabricDDPStrategy":
        from paceline.integrations.lightning.fabric import FabricDDPStrategy

        return FabricDDPStrategy
    if name == "DDPStrategy":
        from paceline.integrations.lightning.trainer import DDPStrategy

        return DDPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
