"""Which parameters does a backward reach?

Of a backward that runs, the autograd engine is asked: it has already found out which nodes it will
run, including that an output did not enter the loss. torch's DDP walks the graph from the module's
outputs instead. Before a backward there is only the graph: :func:`is_in_graph` walks it, until it
has found one parameter.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Set
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.distributed import rpc

from paceline.torch_private import will_run_node


class Reach(enum.Enum):
    """What the running backward does about a parameter."""

    RUNS = enum.auto()
    """Its gradient will be accumulated."""

    CAPTURED = enum.auto()
    """Its gradient is handed out instead: ``torch.autograd.grad``."""

    UNREACHED = enum.auto()
    """No gradient will be computed."""


def reach_of(node: Any) -> Reach:
    """Ask the running backward what it does with one AccumulateGrad node."""
    try:
        return Reach.RUNS if will_run_node(node) else Reach.UNREACHED
    except RuntimeError:
        # The engine refuses to answer for a leaf whose gradient it captures.
        return Reach.CAPTURED


def first_reached(nodes: Iterable[Any]) -> Reach:
    """Return how the first parameter is reached that is reached at all."""
    for node in nodes:
        reach = reach_of(node)
        if reach is not Reach.UNREACHED:
            return reach
    return Reach.UNREACHED


def is_in_graph(outputs: Iterable[Any], wanted: Set[Any]) -> bool:
    """Say whether some node of ``wanted`` hangs below ``outputs``; stops at the first."""
    seen: set[Any] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node in wanted:
            return True
        seen.add(node)
        stack.extend(next_node for next_node, _ in node.next_functions)
    return False


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output; containers, dataclasses and owned RRefs are searched."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name))
    elif rpc.is_available() and isinstance(value, rpc.RRef) and value.is_owner():
        yield from find_tensors(value.local_value())
