"""The random stream of a shard: what dropout and augmentation draw, whatever rank runs it.

A stream is given by seed, round and shard, through a hash: there is nothing to keep or to send when
shards move from rank to rank. The process's own streams go on afterwards as if nothing had been
drawn.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def stream_seed(seed: int, *place: int) -> int:
    """Return 64 bits that belong to a place, for example a round and a shard."""
    text = ",".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def seed_all(seed: int) -> None:
    """Begin the streams of torch (all devices in use), numpy (if it is imported) and random."""
    torch.default_generator.manual_seed(seed)
    accelerator = _accelerator()
    if accelerator is not None:
        accelerator.manual_seed_all(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


class OwnStreams:
    """What the process would draw next, to be put back."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        accelerator = _accelerator()
        self._devices = [] if accelerator is None else accelerator.get_rng_state_all()
        self._random = random.getstate()
        numpy = _numpy()
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None

    def put_back(self) -> None:
        """Go on as if nothing had been drawn since."""
        torch.default_generator.set_state(self._torch)
        accelerator = _accelerator()
        if self._devices and accelerator is not None:
            accelerator.set_rng_state_all(self._devices)
        random.setstate(self._random)
        numpy = _numpy()
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)


def _accelerator() -> Any:
    """torch.cuda, torch.xpu, ...: that of this machine, once the process uses it."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    is_used = getattr(module, "is_initialized", None)
    return module if is_used is not None and is_used() else None


def _numpy() -> Any:
    return sys.modules.get("numpy")
