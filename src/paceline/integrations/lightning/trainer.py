"""The Trainer's strategy and callback, for ``import lightning``."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies.ddp import DDPStrategy as LightningDDPStrategy

from paceline.integrations.lightning.mixins import TrainerMixin
from paceline.integrations.lightning.report import ReportMixin


class DDPStrategy(TrainerMixin, LightningDDPStrategy):
    """Lightning's DDP strategy with Paceline's wrapper. Takes the arguments of both."""

    _torch_layer_sync = TorchSyncBatchNorm


class ReportCallback(ReportMixin, Callback):
    """Gives recorded steps their loss, and writes the report at the end of ``fit``."""
