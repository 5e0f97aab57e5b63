"""The model and the data that all frameworks train on, and a stand-in for LoRA's base model."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

WIDTH = 12


class Net(nn.Module):
    """Layers that frameworks have to get right: dropout, norm with buffers, an optional branch."""

    def __init__(self, *, branch: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.GELU())
        self.middle = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU())
        self.last = nn.Linear(32, 3)
        self.branch = nn.Linear(32, 3) if branch else None
        self.checkpointed = checkpointed
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = partial(checkpoint, self.middle, use_reentrant=False)
        x = (middle if self.checkpointed else self.middle)(self.first(x))
        self.calls += 1
        if self.branch is not None and self.calls % 2:
            return self.last(x) + self.branch(x)
        return self.last(x)


class Averages:
    """Both averages of torch.optim.swa_utils: exponential, and SWA's over all steps."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        ema = get_ema_multi_avg_fn(0.9)
        self.kinds = [AveragedModel(module, multi_avg_fn=ema, use_buffers=True)]
        self.kinds.append(AveragedModel(module, use_buffers=True))

    def update(self) -> None:
        for average in self.kinds:
            average.update_parameters(self.module)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter for average in self.kinds for parameter in average.parameters()]


def dataset(samples: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, WIDTH, generator=generator)
    y = (x[:, :3] + 0.1 * torch.randn(samples, 3, generator=generator)).argmax(dim=1)
    return TensorDataset(x, y)


def make(**options: bool) -> Net:
    torch.manual_seed(0)
    return Net(**options)
