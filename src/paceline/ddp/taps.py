"""Where the reducer listens: hooks on AccumulateGrad nodes and on the outputs of a forward.

The hooks on parameters hold the listener weakly, so that a wrapper, its buckets and its memory are
freed when the user lets go of it, and a deep copy of the module carries none of them. The hooks on
outputs hold it strongly: a backward that is still to come will be reduced, also if the wrapper was
a temporary. They go with the graph.

[Note: why AccumulateGrad nodes]
``register_post_accumulate_grad_hook`` would be the obvious choice, but it stays silent under
distributed autograd. A hook on the node fires in both engines. The node must be kept alive, because
a parameter refers to it only weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Protocol

import torch

from paceline.ddp.unused import is_in_graph

WAITING_BYTES = 4 << 20
"""Large gradients wait until they have so many bytes together: this bounds the extra memory."""


class Listener(Protocol):
    """Who is told: the reducer."""

    def on_gradients(self) -> None:
        """Gradients have been accumulated: as many as were due are in the inbox."""

    def on_output(self, leads_to_parameters: bool) -> None:
        """A backward has reached an output of the module."""


class Inbox(list[int]):
    """Parameters, by index, whose gradients have arrived and have not been taken yet.

    [Note: batches] The listener is told when ``due`` are in the inbox, so that most gradients cost
    one append. It sets ``due`` to how many must at least arrive before a bucket can be full, so a
    batch never delays a reduction, in whatever order gradients come. While no step is under way,
    every gradient is due. Hooks may run on several threads: an append is atomic, and the listener
    removes entries at the front only.

    [Note: large gradients] They wait for each other, too: between two layers' matrix products all
    that a listener needs has left the caches, and telling it for one gradient takes 0.2 ms. So it
    is told when ``waiting_bytes`` of large gradients have reached a limit. Two threads may lose a
    count between them; the bucket that becomes full makes the gradients due then.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.due = 1
        self.waiting_bytes = 0
        self._listener = weakref.ref(listener)

    def tell(self) -> None:
        """Tell the listener, if it still lives."""
        listener = self._listener()
        if listener is not None:
            listener.on_gradients()

    def take(self) -> list[int]:
        """Remove and return what is there."""
        self.waiting_bytes = 0
        count = len(self)
        taken = self[:count]
        del self[:count]
        return taken

    def clear(self) -> None:
        """Forget what is there."""
        self.waiting_bytes = 0
        super().clear()


class GradientTaps:
    """Hooks on the AccumulateGrad nodes of some parameters.

    Those that are ``large`` wait for a few others only ([Note: large gradients]).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], inbox: Inbox, large: Set[int]) -> None:
        self.nodes: list[Any] = []
        self._handles: list[Any] = []
        for index, parameter in enumerate(parameters):
            node = accumulate_node(parameter)
            self.nodes.append(node)
            large_bytes = parameter.nbytes if index in large else 0
            self._handles.append(node.register_hook(_gradient_hook(inbox, index, large_bytes)))

    def remove(self) -> None:
        """Stop listening. Gradients stay local from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def accumulate_node(parameter: torch.Tensor) -> Any:
    """Return the node at which a parameter's gradient is accumulated."""
    with torch.enable_grad():
        grad_fn = parameter.view_as(parameter).grad_fn
    assert grad_fn is not None
    return grad_fn.next_functions[0][0]


def tap_outputs(
    tensors: Iterable[torch.Tensor], parameter_nodes: Set[Any], listener: Listener
) -> None:
    """Tell the listener when a backward reaches one of these outputs.

    It is also told whether parameters hang on the output at all; that cannot be asked later,
    because a hook that kept its node would keep the whole graph alive.
    """
    nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    if not nodes:
        return
    leads_to_parameters = is_in_graph(list(nodes), parameter_nodes)

    def on_output(_: Any) -> None:
        listener.on_output(leads_to_parameters)

    for node in nodes:
        node.register_prehook(on_output)


def _gradient_hook(inbox: Inbox, index: int, large_bytes: int) -> Callable[..., None]:
    append = inbox.append

    def on_gradient(*_: Any) -> None:
        append(index)
        if len(inbox) >= inbox.due:
            inbox.tell()

    def on_large_gradient(*_: Any) -> None:
        append(index)
        waiting = inbox.waiting_bytes = inbox.waiting_bytes + large_bytes
        if waiting >= WAITING_BYTES:
            inbox.due = 1
        if len(inbox) >= inbox.due:
            inbox.tell()

    return on_large_gradient if large_bytes else on_gradient
