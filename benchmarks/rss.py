"""The inside of a rank of the memory benchmark: resident memory, and its high-water mark.

torch does not count what it allocates on CPU, so the kernel is asked. The mark can be reset, and
malloc is told to return blocks at once: the mark then shows what lives.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paceline.cli.bench.harness import malloc
from paceline.cli.bench.harness.contenders import Contender
from paceline.cli.bench.harness.resident import reset_high_water_mark, resident_bytes

WIDTH, LAYERS = 1000, 50
GRADIENT_BYTES = LAYERS * WIDTH * WIDTH * 4
RETURNED_ABOVE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Peaks:
    """Bytes above the module with its weights.

    Attributes:
        constructed: Resident once the wrapper is made.
        first: The highest in the first step, with the making of the wrapper.
        second: In the second step, where buckets are rebuilt.
        later: In the three steps after that.
        held: Resident between steps, with the gradients.
    """

    constructed: int
    first: int
    second: int
    later: int
    held: int

    @property
    def highest(self) -> int:
        """The highest of all."""
        return max(self.first, self.second, self.later)


def measure_peaks(contender: Contender, sets_to_none: bool) -> Peaks:
    """Train a few steps and watch; called on every rank, in a fresh process."""
    malloc.return_memory(RETURNED_ABOVE_BYTES)
    _load_everything(contender)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    gc.collect()
    base = _resident("VmRSS")
    reset_high_water_mark()
    model = contender.wrap(module)
    constructed = _resident("VmRSS") - base
    first = _peak_of_steps(model, 1, WIDTH, sets_to_none) - base
    second = _peak_of_steps(model, 1, WIDTH, sets_to_none) - base
    later = _peak_of_steps(model, 3, WIDTH, sets_to_none) - base
    return Peaks(constructed, first, second, later, held=_resident("VmRSS") - base)


def _load_everything(contender: Contender) -> None:
    """Use a tiny model first: imports, thread pools and the group's buffers are not counted."""
    model = contender.wrap(nn.Linear(8, 8))
    _peak_of_steps(model, 3, 8, sets_to_none=True)


def _peak_of_steps(model: nn.Module, steps: int, width: int, sets_to_none: bool) -> int:
    """Run steps and return the highest resident size since the last reset; reset."""
    batch = torch.ones(4, width)
    for _ in range(steps):
        model.zero_grad(set_to_none=sets_to_none)
        model(batch).sum().backward()
    peak = _resident("VmHWM")
    reset_high_water_mark()
    return peak


def _resident(name: str) -> int:
    return resident_bytes(name, dist.get_rank())
