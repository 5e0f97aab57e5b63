"""Put the class under test in the place of torch's DistributedDataParallel.

With Paceline's class, Paceline's SyncBatchNorm takes the place of torch's too, which refuses CPUs.

Done once in the process that all test processes are forked from, so every rank has it. What is put
there is a real subclass (tests call it, pickle it and use its static methods). It takes off the
arguments that `on_cpu.py` made meaningless, and has defaults that a run may set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch.nn.parallel

ORIGINAL = torch.nn.parallel.DistributedDataParallel
ORIGINAL_NORM = torch.nn.SyncBatchNorm
CHOICES = ("torch", "paceline")


def swap_in(choice: str) -> None:
    """Replace torch's class by the chosen one under every name that a loaded module has for it."""
    global UnderTest  # pickle finds the class by this name
    UnderTest = _subclass(_choose(choice))
    _replace(ORIGINAL, UnderTest)
    if choice == "paceline":
        import paceline.nn

        _replace(ORIGINAL_NORM, paceline.nn.SyncBatchNorm)


def record_to(path: Path) -> None:
    """Have every wrapper that is made from now on, in forked processes too, add a line there."""
    UnderTest.record = path


def set_defaults(**defaults: Any) -> None:
    """Set keyword arguments that the class under test gets when a test does not give them."""
    UnderTest.defaults = defaults


def _choose(choice: str) -> Any:
    if choice == "torch":
        return ORIGINAL
    if choice == "paceline":
        import paceline

        return paceline.DistributedDataParallel
    raise ValueError(f"the class under test must be one of {CHOICES}, not {choice!r}")


def _subclass(base: Any) -> Any:
    class UnderTest(base):
        defaults: ClassVar[dict[str, Any]] = {}
        record: ClassVar[Path | None] = None

        def __init__(
            self,
            module: torch.nn.Module,
            device_ids: object = None,
            output_device: object = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            super().__init__(module, None, None, *args, **{**self.defaults, **kwargs})
            if self.record is not None:
                _add_line(self.record, f"{base.__module__}.{base.__qualname__}")

    UnderTest.__qualname__ = UnderTest.__name__
    return UnderTest


UnderTest: Any = ORIGINAL


def _add_line(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{text}\n".encode())  # one write: ranks do not mix their lines
    os.close(descriptor)


def _replace(original: Any, replacement: Any) -> None:
    for module, name in list(_bindings_of(original)):
        setattr(module, name, replacement)


def _bindings_of(original: Any) -> Iterator[tuple[ModuleType, str]]:
    for module_name, module in list(sys.modules.items()):
        # These two mean the original when they name it: it is what they build on.
        if module_name == __name__ or module_name.partition(".")[0] == "paceline":
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                yield module, name
