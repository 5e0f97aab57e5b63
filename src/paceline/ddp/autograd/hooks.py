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

from paceline.buckets import Slot
from paceline.ddp.autograd.unused import find_tensors
from paceline.native.extension import native
from paceline.torch_private import never_compiled, tensor_exchange

WAITING_BYTES = 4 << 20
"""Large gradients wait until they have so many bytes together: this bounds the extra memory."""


class Listener(Protocol):
    """Who is told: the reducer."""

    def on_gradients(self) -> None:
        """Gradients have been accumulated: as many as were due are in the inbox."""

    def on_output(self, leads_to_parameters: bool) -> None:
        """A backward has reached an output of the module."""


class Inbox(Protocol):
    """Parameters, by index, whose gradients have arrived and have not been taken yet.

    [Note: warm gradients] While it is open, the hooks bring gradients into their buckets at once,
    scaled: a gradient has just been written then, and is in a cache, and its memory serves the next
    one. Only the native core does that, with float32 on the CPU; what is not as usual is left to
    the listener, gradient by gradient.

    [Note: batches] The listener is told when ``due`` are in the inbox, so that most gradients cost
    one append. It sets ``due`` to how many must at least arrive before a bucket can be full, so a
    batch never delays a reduction, in whatever order gradients come. While no step is under way,
    every gradient is due. Hooks may run on several threads: an append is atomic, and the listener
    removes entries at the front only.

    [Note: large gradients] They wait for each other, too: between two layers' matrix products all
    that a listener needs has left the caches, and telling it for one gradient takes 0.2 ms. So it
    is told when ``WAITING_BYTES`` of large gradients are there. Two threads may lose a count
    between them; the bucket that becomes full makes the gradients due then.
    """

    due: int

    def __len__(self) -> int:
        """How many are there."""

    def tap(self, index: int, large_bytes: int, /) -> Callable[..., None]:
        """Return a hook that puts ``index`` into the inbox, and then tells if that is due.

        ``large_bytes`` is 0 for a gradient that is not large.
        """

    def open(self, slots: list[Slot | None], factor: float, /) -> bool:
        """Let hooks bring in what has a slot, times a factor; say whether they will.

        Each once, from then on; a parameter's grad is its slot's view then.
        """

    def withhold(self, index: int, /) -> None:
        """Let the hook of one parameter leave it: no gradient is expected there."""

    def shut(self) -> None:
        """Let hooks leave gradients where they are, as they do before it is opened."""

    def first(self) -> int:
        """Return what came first, and leave it."""

    def take(self) -> tuple[list[int], list[int]]:
        """Remove and return what is there: all, and of these what was left to be brought in."""

    def clear(self) -> None:
        """Forget what is there."""


class PythonInbox:
    """What :func:`make_inbox` makes where the native core is missing."""

    def __init__(self, tell: Callable[[], None], most_bytes: int) -> None:
        self.due = 1
        self._tell = tell
        self._most_bytes = most_bytes
        self._waiting_bytes = 0
        self._items: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    @never_compiled
    def tap(self, index: int, large_bytes: int, /) -> Callable[..., None]:
        """Return a hook; autograd hands it gradients, which it does not look at."""

        def on_gradient(*_: Any) -> None:
            self._items.append(index)
            self._waiting_bytes += large_bytes
            if self._waiting_bytes >= self._most_bytes:
                self.due = 1
            if len(self._items) >= self.due:
                self._tell()

        return on_gradient

    def first(self) -> int:
        """Return what came first, and leave it."""
        return self._items[0]

    def open(self, _slots: list[Slot | None], _factor: float, /) -> bool:
        """Leave all gradients to the listener: a copy by torch costs the same there."""
        return False

    def withhold(self, _index: int, /) -> None:
        """Nothing is brought in anyway."""

    def shut(self) -> None:
        """It never was open."""

    def take(self) -> tuple[list[int], list[int]]:
        """Remove and return what is there; all of it was left."""
        self._waiting_bytes = 0
        count = len(self._items)
        taken = self._items[:count]
        del self._items[:count]
        return taken, taken

    def clear(self) -> None:
        """Forget what is there."""
        self._waiting_bytes = 0
        self._items.clear()


@never_compiled
def make_inbox(listener: Listener) -> Inbox:
    """Make an inbox that tells the listener, as long as it lives; in C if that was built."""
    reference = weakref.ref(listener)

    def tell() -> None:
        alive = reference()
        if alive is not None:
            alive.on_gradients()

    if native is None:
        return PythonInbox(tell, WAITING_BYTES)
    inbox: Inbox = native.Inbox(tell, WAITING_BYTES, tensor_exchange())
    return inbox


class GradientTaps:
    """Hooks on the AccumulateGrad nodes of some parameters.

    Those that are ``large`` wait for a few others only ([Note: large gradients]).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], inbox: Inbox, large: Set[int]) -> None:
        self._parameters = parameters
        self.nodes: list[Any] = []
        self._handles: list[Any] = []
        for index, parameter in enumerate(parameters):
            node = _accumulate_node(parameter)
            self.nodes.append(node)
            large_bytes = parameter.nbytes if index in large else 0
            self._handles.append(node.register_hook(inbox.tap(index, large_bytes)))

    def are_intact(self, indices: Iterable[int]) -> bool:
        """Whether these parameters still lead to our nodes."""
        return all(_accumulate_node(self._parameters[i]) is self.nodes[i] for i in indices)

    def remove(self) -> None:
        """Stop listening. Gradients stay local from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _accumulate_node(parameter: torch.Tensor) -> Any:
    """Return the node at which a parameter's gradient is accumulated; also if it is frozen now."""
    is_frozen = not parameter.requires_grad
    if is_frozen:
        parameter.requires_grad_()
    with torch.enable_grad():
        grad_fn = parameter.view_as(parameter).grad_fn
    if is_frozen:
        parameter.requires_grad_(False)
    assert grad_fn is not None
    return grad_fn.next_functions[0][0]


def nodes_of(output: Any) -> set[Any]:
    """Return the nodes at which a backward enters the graph of a forward's output."""
    return {tensor.grad_fn for tensor in find_tensors(output) if tensor.grad_fn is not None}


@never_compiled
def tap_nodes(nodes: Iterable[Any], listener: Listener, *, leads_to_parameters: bool) -> None:
    """Tell the listener when a backward reaches one of these nodes of a forward's output.

    It is also told whether parameters hang on them at all; that cannot be asked later, because
    a hook that kept its node would keep the whole graph alive.
    """

    def on_output(_: Any) -> None:
        listener.on_output(leads_to_parameters)

    for node in nodes:
        node.register_prehook(on_output)
