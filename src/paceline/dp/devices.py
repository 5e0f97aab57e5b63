"""The one place of ``paceline.dp`` that knows what kinds of devices there are.

Everything above says "put this tensor there" and "run on this device"; whether that means a stream,
a copy between accelerators or nothing at all (CPU) is decided here. Called by all of
:mod:`paceline.dp`. Must not know about modules or replicas.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from paceline.errors import PlacementError

CPU = torch.device("cpu")

DeviceLike = int | str | torch.device
"""What users write: an accelerator's number, a name, a device."""


def accelerator_type() -> str | None:
    """Return the kind of accelerator that this machine has, for example ``"cuda"``."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def all_accelerators() -> list[torch.device]:
    """Return every accelerator of this machine; empty if there is none."""
    kind = accelerator_type()
    if kind is None:
        return []
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def parse_device(device: DeviceLike) -> torch.device:
    """Return the one device that is meant; all ways to write the CPU are the same device.

    Raises:
        PlacementError: If a number is given and there is no accelerator, or if a device is named
            that this machine does not have.
    """
    if isinstance(device, int):
        return _numbered(device)
    parsed = torch.device(device)
    if parsed.type == "cpu":
        return CPU
    _check_exists(parsed)
    index: int | None = parsed.index
    if index is None and parsed.type == accelerator_type():
        return torch.device(parsed.type, torch.accelerator.current_device_index())
    return parsed


def _check_exists(device: torch.device) -> None:
    """The meta device is everywhere; other kinds are accelerators."""
    if device.type == "meta":
        return
    there = all_accelerators()
    named = [one for one in there if one.type == device.type]
    index: int | None = device.index
    if not named or (index is not None and device not in named):
        names = ", ".join(map(str, there)) or "no accelerator"
        raise PlacementError(
            f"There is no device {device} here; this machine has {names}. For replicas on CPU "
            'threads, write device_ids=["cpu", "cpu"].'
        )


def _numbered(index: int) -> torch.device:
    if index == -1:
        warnings.warn(
            'The number -1 for the CPU is on its way out: write "cpu".', FutureWarning, stacklevel=4
        )
        return CPU
    kind = accelerator_type()
    if kind is None:
        raise PlacementError(
            f"Device {index} means accelerator number {index}, and this machine has none. For "
            'replicas on CPU threads, write device_ids=["cpu", "cpu"].'
        )
    return torch.device(kind, index)


def parse_devices(devices: Iterable[DeviceLike]) -> list[torch.device]:
    """Parse each of several devices."""
    return [parse_device(device) for device in devices]


def torch_id(device: torch.device) -> int | torch.device:
    """Return a device as ``DataParallel.device_ids`` shows it: accelerators by their number."""
    if device.type == accelerator_type():
        return int(device.index)
    return device


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on a device: itself if it is there already. Gradients flow back."""
    if tensor.device == device:
        return tensor
    # The copy runs on the target's current stream, which the replica runs on too: nobody waits.
    return tensor.to(device, non_blocking=device.type != "cpu")


class DeviceScope:
    """Where one replica runs: a device, and the stream that its caller uses on it."""

    __slots__ = ("_stream", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_accelerator = device.type == accelerator_type()
        self._stream: Any = torch.accelerator.current_stream(device) if on_accelerator else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run on this device and stream, from whatever thread."""
        if self._stream is None:
            yield
            return
        with torch.accelerator.device_index(self.device.index), self._stream:
            yield
