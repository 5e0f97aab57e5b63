"""Arguments of SyncBatchNorm are torch's."""

from __future__ import annotations

import inspect

import torch

import paceline


def test_arguments() -> None:
    ours, theirs = paceline.nn.SyncBatchNorm, torch.nn.SyncBatchNorm
    assert inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
    mine = inspect.signature(ours.convert_sync_batchnorm)
    assert (
        mine.parameters.keys() == inspect.signature(theirs.convert_sync_batchnorm).parameters.keys()
    )
