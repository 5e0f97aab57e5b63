"""Multi-process data parallelism."""

from paceline.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
