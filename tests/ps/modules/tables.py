"""Tables of one pair of servers, for the tests of the modules."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

ROWS, DIM = 12, 4
LR = 0.5
names = (f"table {at}" for at in count())


def gradient_like(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
