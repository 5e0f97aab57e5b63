"""``choose``: which hook is the fastest for this model, on this machine, over a link of this speed.

Called by users before training. It measures how long compression takes here, counts what would be
sent, and adds up. How well a model trains with a hook, it cannot know: so hooks that change more
than roundings are left out unless they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.hooks.cost import measure
from paceline.hooks.registry import Wrapper, register

ROUNDING: dict[str, dict[str, Any]] = {"allreduce": {}, "bf16": {}, "fp16": {}, "int8": {}}
"""Hooks whose error is a rounding of every value."""

LOSSY: dict[str, dict[str, Any]] = {
    "powersgd": {"start_powerSGD_iter": 1000},
    "topk": {"ratio": 0.01, "warmup_steps": 1000},
}
"""Hooks that leave out most values at first: watch the loss, and tune."""

_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
# A hook must be this much faster than a simpler one, and save more than a measurement is off by.
_WORTH_IT = 0.95
_WORTH_S = 0.001


@dataclass(frozen=True)
class HookCost:
    """What one step costs with a hook.

    Attributes:
        name: As :func:`paceline.hooks.register` knows it.
        options: For it.
        sent_bytes: By each rank.
        compute_s: To compress and decompress.
    """

    name: str
    options: Mapping[str, Any]
    sent_bytes: int
    compute_s: float

    def seconds(self, bits_per_s: float) -> float:
        """How long the reduction takes over such a link, if nothing of it hides behind backward."""
        return self.compute_s + 8 * self.sent_bytes / bits_per_s


@dataclass(frozen=True)
class Choice:
    """What :func:`choose` found; ``choice.register(ddp)`` puts it to use.

    Attributes:
        name: The hook.
        options: For it.
        link_bits_per_s: What was asked for.
        costs: Of all hooks that were looked at, the simplest first.
    """

    name: str
    options: Mapping[str, Any]
    link_bits_per_s: float
    costs: tuple[HookCost, ...]

    def register(self, model: Wrapper, process_group: Any = None) -> Any:
        """Register the hook and return its state."""
        return register(model, self.name, process_group, **self.options)

    def __str__(self) -> str:
        """One line for each hook."""
        lines = [
            f"{'->' if cost.name == self.name else '  '} {cost.name:10} "
            f"{cost.seconds(self.link_bits_per_s) * 1e3:9.1f} ms a step: "
            f"{cost.compute_s * 1e3:.1f} ms of compression, {cost.sent_bytes / 1e6:.2f} MB sent"
            for cost in self.costs
        ]
        return "\n".join(lines)


def choose(
    model: torch.nn.Module,
    link: str | float = "1gbit",
    *,
    world: int | None = None,
    lossy: bool = False,
) -> Choice:
    """Say which hook makes the reduction of a model's gradients fastest.

    Args:
        model: The module, wrapped or not.
        link: The slowest link between ranks: ``"100mbit"``, ``"1gbit"``, or bits per second.
        world: How many ranks; None is the size of the default group, or 2 without one.
        lossy: Also look at PowerSGD and top-k, which need care.

    Raises:
        ConfigurationError: The link is not understood, there is nothing to train, or nobody who
            does it.
    """
    bits_per_s = parse_link(link)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigurationError("choose: the model has no parameter that requires a gradient.")
    if world is None:
        world = dist.get_world_size() if dist.is_initialized() else 2
    if world < 1:
        raise ConfigurationError(f"choose: there is at least 1 rank, but world={world!r}.")
    candidates = ROUNDING | (LOSSY if lossy else {})
    costs = tuple(
        HookCost(name, options, *measure(parameters, name, options, world))
        for name, options in candidates.items()
    )
    best = costs[0]
    for cost in costs[1:]:
        best_s = best.seconds(bits_per_s)
        most_s = min(_WORTH_IT * best_s, best_s - _WORTH_S)
        if cost.seconds(bits_per_s) < most_s:
            best = cost
    return Choice(best.name, best.options, bits_per_s, costs)


def parse_link(link: str | float) -> float:
    """Return bits per second.

    Raises:
        ConfigurationError: If it is written otherwise than ``"1gbit"`` or as a number above 0.
    """
    if isinstance(link, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", link.strip().lower())
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    else:
        value = float(link)
    if not value > 0:
        raise ConfigurationError(
            f'link={link!r} is not understood. Write "100mbit", "1gbit", "25gbit", or a number of '
            "bits per second."
        )
    return value
