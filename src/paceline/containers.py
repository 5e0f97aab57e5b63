"""Containers that tensors travel in: what is inside, and how to build the same with other things.

Tuples, named tuples, lists, dicts and dataclasses, nested as you like. Called by whatever looks
for tensors in what a user hands over: DataParallel, the hooks on outputs, drift, the recorder of
collectives. Why not ``torch.utils._pytree`` alone: docs/decisions/0011. Must not know about
devices.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed import rpc

from paceline.torch_private.modules import registered_contents


def is_namedtuple(value: Any) -> bool:
    """Whether this is an instance of a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


def is_dataclass(value: Any) -> bool:
    """Whether this is an instance of a dataclass, not the class itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def contents(value: Any) -> list[Any] | None:
    """Return what a container holds, in order; None if it is no container."""
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, name) for name in field_names(value)]
    return None


def field_names(value: Any) -> list[str]:
    """Return the fields of a dataclass that have a value."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def rebuild(like: Any, parts: Sequence[Any]) -> Any:
    """Build a container of the same type, and keys or fields, with other contents."""
    if is_namedtuple(like):
        return like._make(parts)
    if isinstance(like, (tuple, list)):
        return type(like)(parts)
    if isinstance(like, dict):
        return _rebuild_dict(like, list(zip(like, parts, strict=True)))
    made = copy.copy(like)
    for name, part in zip(field_names(like), parts, strict=True):
        object.__setattr__(made, name, part)  # a frozen dataclass, too
    return made


def _rebuild_dict(like: dict[Any, Any], items: list[tuple[Any, Any]]) -> Any:
    try:
        return type(like)(items)
    except TypeError:  # a defaultdict wants its factory first
        made = copy.copy(like)
        made.update(items)
        return made


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nest of containers; RRefs that this process owns are opened too."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = contents(value)
    if parts is None:
        parts = [value.local_value()] if is_owned_rref(value) else registered_contents(value)
    for part in parts:
        yield from tensors_in(part)


def is_owned_rref(value: Any) -> bool:
    """Whether this is an RRef whose value is here."""
    return rpc.is_available() and isinstance(value, rpc.RRef) and value.is_owner()


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor in a nest of containers, if there is one."""
    return next(tensors_in(value), None)
