"""Modules that compute over all ranks."""

from paceline.nn.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
