"""Fabric's strategy, for ``import lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.strategies.ddp import DDPStrategy

from paceline.integrations.lightning.mixins import FabricMixin


class FabricDDPStrategy(FabricMixin, DDPStrategy):
    """Lightning Fabric's DDP strategy with Paceline's wrapper. Takes the arguments of both."""
