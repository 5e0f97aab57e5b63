"""What is compared: ways to wrap a module, each behind one function.

A variant travels to the ranks as an import path, so that a copy of Paceline under another name can
be measured beside the real one (``--also``).
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
class Variant:
    """A wrapper class by its import path, with keyword arguments; no path: the bare module."""

    label: str
    path: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def wrap(self, module: nn.Module, **more: Any) -> nn.Module:
        """Return the module, wrapped with the variant's options and these."""
        if not self.path:
            return module
        module_name, _, class_name = self.path.partition(":")
        wrapper = getattr(importlib.import_module(module_name), class_name)
        wrapped: nn.Module = wrapper(module, **self.options, **more)
        return wrapped


_TORCH_CLASS = "torch.nn.parallel:DistributedDataParallel"

STANDARD = (
    Variant(LOCAL),
    Variant(TORCH, _TORCH_CLASS),
    Variant(TORCH_VIEWS, _TORCH_CLASS, {"gradient_as_bucket_view": True}),
    Variant(PACELINE, "paceline:DistributedDataParallel"),
)

CONTROL = Variant("torch views again", _TORCH_CLASS, {"gradient_as_bucket_view": True})
"""A second copy of a variant: how far its ratio is from 1 is how noisy the run was."""


def parse_variant(text: str) -> Variant:
    """Read ``LABEL=MODULE:CLASS``, for argparse."""
    label, equals, path = text.partition("=")
    if not (label and equals and ":" in path):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LABEL=MODULE:CLASS")
    if label in {variant.label for variant in (*STANDARD, CONTROL)}:
        raise argparse.ArgumentTypeError(f"the label {label!r} is taken")
    return Variant(label, path)
