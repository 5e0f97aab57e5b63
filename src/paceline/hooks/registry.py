"""Hooks by name: torch's enum, and one function that registers any of ours.

Called by users. Knows every hook; nothing in this package knows it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.errors import ConfigurationError, UnknownHookError
from paceline.hooks.compress import bf16_compress_hook, fp16_compress_hook
from paceline.hooks.diloco import DiLoCoState, diloco_hook
from paceline.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from paceline.hooks.quantize import quantization_perchannel_hook, quantization_pertensor_hook
from paceline.hooks.quantized import QuantizedState, quantized_hook
from paceline.hooks.topk import TopKState, topk_hook
from paceline.hooks.uncompressed import allreduce_hook, noop_hook


class Wrapper(Protocol):
    """What a hook can be registered with: torch's DDP and ours."""

    def register_comm_hook(self, state: Any, hook: Any) -> None: ...


@dataclass(frozen=True)
class Registration:
    """Registers one hook; what a member of :class:`DDPCommHookType` holds."""

    hook: Callable[..., Any]
    state: type | None = None  # None: the hook's state is its process group
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *, model: Wrapper, state: Any = None, **options: Any) -> Any:
        """Register the hook, with ``state`` as its process group, and return the hook's state."""
        made = self.make_state(state, **options)
        model.register_comm_hook(made, self.hook)
        return made

    def make_state(self, process_group: Any, **options: Any) -> Any:
        """Return a new state for the hook."""
        if self.state is None:
            return process_group
        return self.state(process_group, **self.fixed, **options)

    def options(self) -> list[str]:
        """What :meth:`make_state` takes."""
        if self.state is None:
            return []
        names = inspect.signature(self.state).parameters
        return [name for name in names if name != "process_group" and name not in self.fixed]


def _power_sgd(hook: Callable[..., Any], rank: int) -> Registration:
    return Registration(hook, PowerSGDState, {"matrix_approximation_rank": rank})


def _quantized(wire: str) -> Registration:
    return Registration(quantized_hook, QuantizedState, {"wire": wire})


class DDPCommHookType(enum.Enum):
    """torch's names for its hooks; ``DDPCommHookType.POWER_SGD.value(model=ddp, state=group)``."""

    ALLREDUCE = Registration(allreduce_hook)
    FP16_COMPRESS = Registration(fp16_compress_hook)
    BF16_COMPRESS = Registration(bf16_compress_hook)
    QUANTIZE_PER_TENSOR = Registration(quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = Registration(quantization_perchannel_hook)
    POWER_SGD = _power_sgd(powerSGD_hook, 1)
    POWER_SGD_RANK2 = _power_sgd(powerSGD_hook, 2)
    BATCHED_POWER_SGD = _power_sgd(batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = _power_sgd(batched_powerSGD_hook, 2)
    NOOP = Registration(noop_hook)


NAMES: dict[str, Registration] = {
    "allreduce": Registration(allreduce_hook),
    "fp16": Registration(fp16_compress_hook),
    "bf16": Registration(bf16_compress_hook),
    "int8": _quantized("int8"),
    "e4m3": _quantized("e4m3"),
    "e5m2": _quantized("e5m2"),
    "sign": _quantized("sign"),
    "powersgd": Registration(powerSGD_hook, PowerSGDState),
    "batched_powersgd": Registration(batched_powerSGD_hook, PowerSGDState),
    "topk": Registration(topk_hook, TopKState),
    "diloco": Registration(diloco_hook, DiLoCoState),
    "noop": Registration(noop_hook),
}
"""What :func:`register` knows."""


def register_ddp_comm_hook(comm_hook_type: enum.Enum, model: Wrapper, state: Any = None) -> None:
    """Register one of torch's hooks by its type.

    Args:
        comm_hook_type: A member of :class:`DDPCommHookType`, ours or torch's.
        model: The wrapper.
        state: The process group; None is the default group.

    Raises:
        UnknownHookError: It is no member.
    """
    name = str(getattr(comm_hook_type, "name", ""))
    if name not in DDPCommHookType.__members__:
        raise UnknownHookError(
            f"register_ddp_comm_hook takes a member of DDPCommHookType, not {comm_hook_type!r}. "
            f"Members: {', '.join(DDPCommHookType.__members__)}. For Paceline's own hooks use "
            "hooks.register(model, name)."
        )
    DDPCommHookType[name].value(model=model, state=state)


def register(model: Wrapper, name: str, process_group: Any = None, **options: Any) -> Any:
    """Register a hook by its short name and return its state.

    >>> state = register(ddp, "int8", stochastic=True)  # doctest: +SKIP

    Args:
        model: The wrapper.
        name: A key of :data:`NAMES`.
        process_group: What to reduce over; None is the group of the wrapper.
        options: Of the hook's state.

    Raises:
        UnknownHookError: There is no hook of that name.
        ConfigurationError: The hook does not have such an option, or not with such a value.
    """
    if name not in NAMES:
        raise UnknownHookError(
            f"There is no hook {name!r}. Write one of: {', '.join(map(repr, NAMES))}; or pass your "
            "own function to model.register_comm_hook(state, hook)."
        )
    registration = NAMES[name]
    _check_options(name, registration, options)
    group = getattr(model, "process_group", None) if process_group is None else process_group
    return registration(model=model, state=group, **options)


def _check_options(name: str, registration: Registration, options: Mapping[str, Any]) -> None:
    known = registration.options()
    for option, value in options.items():
        if option not in known:
            takes = f"it takes: {', '.join(known)}" if known else "it takes no options"
            raise ConfigurationError(f"hook {name!r} does not take {option}={value!r}; {takes}")
