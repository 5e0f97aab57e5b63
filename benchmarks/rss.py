"""The inside of a rank of the memory benchmark: resident memory, and its high-water mark.

torch does not count what it allocates on CPU, so the kernel is asked. The mark can be reset
(``/proc/self/clear_refs``), and malloc is told to return blocks at once: the mark then shows what
lives.

Memory that ranks share counts once, for the rank whose arena it is: what a rank has touched of its
peers' arenas is in its resident size too, but takes no memory of its own.
"""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import malloc
from benchmarks.variants import Variant

WIDTH, LAYERS = 1000, 50
GRADIENT_BYTES = LAYERS * WIDTH * WIDTH * 4
RETURNED_ABOVE_BYTES = 64 * 1024
RESET_HIGH_WATER_MARK = "5"


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


def measure_peaks(variant: Variant, sets_to_none: bool) -> Peaks:
    """Train a few steps and watch; called on every rank, in a fresh process."""
    malloc.return_memory(RETURNED_ABOVE_BYTES)
    _load_everything(variant)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    gc.collect()
    base = resident("VmRSS")
    _reset_high_water_mark()
    model = variant.wrap(module)
    constructed = resident("VmRSS") - base
    first = _peak_of_steps(model, 1, WIDTH, sets_to_none) - base
    second = _peak_of_steps(model, 1, WIDTH, sets_to_none) - base
    later = _peak_of_steps(model, 3, WIDTH, sets_to_none) - base
    return Peaks(constructed, first, second, later, held=resident("VmRSS") - base)


def _load_everything(variant: Variant) -> None:
    """Use a tiny model first: imports, thread pools and the group's buffers are not counted."""
    model = variant.wrap(nn.Linear(8, 8))
    _peak_of_steps(model, 3, 8, sets_to_none=True)


def _peak_of_steps(model: nn.Module, steps: int, width: int, sets_to_none: bool) -> int:
    """Run steps and return the highest resident size since the last reset; reset."""
    batch = torch.ones(4, width)
    for _ in range(steps):
        model.zero_grad(set_to_none=sets_to_none)
        model(batch).sum().backward()
    peak = resident("VmHWM")
    _reset_high_water_mark()
    return peak


def _reset_high_water_mark() -> None:
    Path("/proc/self/clear_refs").write_text(RESET_HIGH_WATER_MARK)


def resident(name: str) -> int:
    """Return a resident size (VmRSS, VmHWM) without the arenas of peers."""
    return _read(name) - peers_bytes(Path("/proc/self/smaps").read_text(), dist.get_rank())


def peers_bytes(smaps: str, rank: int) -> int:
    """Add up what is resident of the arenas of other ranks."""
    total, is_foreign = 0, False
    for line in smaps.splitlines():
        if match := re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            arena = re.search(r"/memfd:paceline-arena-(\d+)", line)
            is_foreign = arena is not None and int(arena[1]) != rank
        elif is_foreign and (match := re.match(r"Rss:\s+(\d+) kB$", line)):
            total += int(match[1]) * 1024
    return total


def _read(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match, f"the kernel does not tell {name}"
    return int(match[1]) * 1024
