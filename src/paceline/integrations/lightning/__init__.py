"""Lightning Fabric and Trainer: ``strategy="paceline"``.

Lightning knows the name without an import of this package
(:mod:`paceline.integrations.lightning_names`). Whoever wants other settings makes the object:
``Trainer(strategy=DDPStrategy(nonfinite="raise"))``, ``Fabric(strategy=FabricDDPStrategy(...))``.
These two are for ``import lightning``; ``pytorch_lightning`` and ``lightning_fabric`` have the
same strings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.integrations.lightning_names import register_all
from paceline.on_use import import_on_use

if TYPE_CHECKING:
    from paceline.integrations.lightning.fabric import FabricDDPStrategy
    from paceline.integrations.lightning.trainer import DDPStrategy

__all__ = ["DDPStrategy", "FabricDDPStrategy"]

register_all()

# Apart, because Fabric's users need not wait for the import of the Trainer.
__getattr__ = import_on_use(__name__, {"DDPStrategy": "trainer", "FabricDDPStrategy": "fabric"})
