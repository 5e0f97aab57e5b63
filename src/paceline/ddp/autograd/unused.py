"""Which parameters does a backward reach?

Of a backward that runs, the autograd engine is asked: it has already found out which nodes it will
run, including that an output did not enter the loss. torch's DDP walks the graph from the module's
outputs instead. Before a backward there is only the graph: :func:`is_in_graph` walks it, until it
has found one parameter.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Set
from typing import Any

from paceline.torch_private.autograd import will_run_node


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
