"""What is compared: ways to wrap a module, each behind one function.

A contender travels to the ranks as an import path, so that a copy of Paceline under another name
can be measured beside the real one (``--also``).
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass, field
from typing import Any

from torch import nn

LOCAL = "local"
TORCH = "torch"
TORCH_VIEWS = "torch views"
PACELINE = "paceline"


@dataclass(frozen=True)
class Contender:
    """A way to wrap a module.

    Attributes:
        label: What tables call it.
        path: The wrapper's class, ``MODULE:CLASS``; empty: the bare module.
        options: Its keyword arguments.
        hook: A communication hook of ours, by name.
        change: What a user of Paceline would write to have it; empty if it is no setting of ours.
    """

    label: str
    path: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    hook: str = ""
    change: str = ""

    @property
    def reduces_exactly(self) -> bool:
        """Whether gradients are the mean over ranks, without loss."""
        return bool(self.path) and not self.hook

    def wrap(self, module: nn.Module, **more: Any) -> nn.Module:
        """Return the module, wrapped with the contender's options and these."""
        if not self.path:
            return module
        module_name, _, class_name = self.path.partition(":")
        wrapper = getattr(importlib.import_module(module_name), class_name)
        wrapped: Any = wrapper(module, **self.options, **more)
        if self.hook:
            from paceline import hooks

            hooks.register(wrapped, self.hook, **HOOK_OPTIONS.get(self.hook, {}))
        found: nn.Module = wrapped
        return found


_TORCH_CLASS = "torch.nn.parallel:DistributedDataParallel"
_PACELINE_CLASS = "paceline:DistributedDataParallel"

# The first steps would otherwise be sent whole, and would be what is measured.
HOOK_OPTIONS: dict[str, dict[str, Any]] = {
    "powersgd": {"start_powerSGD_iter": 0, "compresses_first_steps": True},
    "topk": {"ratio": 0.01},
}

WRAPPERS = (
    Contender(LOCAL),
    Contender(TORCH, _TORCH_CLASS),
    Contender(TORCH_VIEWS, _TORCH_CLASS, {"gradient_as_bucket_view": True}),
    Contender(PACELINE, _PACELINE_CLASS),
)

CONTROL = Contender("torch views again", _TORCH_CLASS, {"gradient_as_bucket_view": True})
"""A second copy of a contender: how far its ratio is from 1 is how noisy the run was."""


def transports() -> tuple[Contender, ...]:
    """Paceline over the process group instead of shared memory."""
    options, change = {"transport": "c10d"}, 'DistributedDataParallel(model, transport="c10d")'
    return (Contender("paceline, c10d", _PACELINE_CLASS, options, change=change),)


def bucket_sizes(gradient_bytes: int) -> tuple[Contender, ...]:
    """Paceline with other bucket sizes: those that make a difference for so many gradients."""
    default_mb = 25
    caps = [cap for cap in (1, 5, 100) if gradient_bytes > min(cap, default_mb) * 2**20]
    return tuple(
        Contender(
            f"paceline, buckets of {cap} MB",
            _PACELINE_CLASS,
            {"bucket_cap_mb": cap},
            change=f"DistributedDataParallel(model, bucket_cap_mb={cap})",
        )
        for cap in caps
    )


def hooked(name: str) -> Contender:
    """Paceline with a communication hook."""
    change = f'hooks.register(ddp, "{name}")'
    return Contender(f"paceline, {name}", _PACELINE_CLASS, hook=name, change=change)


def parse_contender(text: str) -> Contender:
    """Read ``LABEL=MODULE:CLASS``, for argparse."""
    label, equals, path = text.partition("=")
    if not (label and equals and ":" in path):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LABEL=MODULE:CLASS")
    if label in {contender.label for contender in (*WRAPPERS, CONTROL)}:
        raise argparse.ArgumentTypeError(f"the label {label!r} is taken")
    return Contender(label, path)
