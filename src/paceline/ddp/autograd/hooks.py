"""Hooks on AccumulateGrad nodes and on the outputs of a forward: how the reducer hears of both.

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
from paceline.containers import tensors_in
from paceline.ddp.autograd.unused import is_in_graph
from paceline.native.extension import native
from paceline.torch_private.autograd import tensor_exchange
from paceline.torch_private.compile import never_compiled

WAITING_BYTES = 4 << 20
"""Large gradients wait until they have so many bytes together: this bounds the extra memory."""


class AutogradListener(Protocol):
    """Who is told: the reducer."""

    def on_gradients(self) -> None:
        """Gradients have been accumulated: as many as were due are in the queue."""

    def on_output(self, leads_to_parameters: bool) -> None:
        """A backward has reached an output of the module."""


class ReadyQueue(Protocol):
    """Parameters, by index, whose gradients have arrived and have not been taken yet.

    [Note: warm gradients] During a step, the hooks copy gradients into their buckets at once,
    scaled: a gradient has just been written then, and is in a cache, and its memory serves the next
    one. Only the native core does that, with float32 on the CPU; what is not as usual is left to
    the listener, gradient by gradient.

    [Note: batches] The listener is told when ``due`` are in the queue, so that most gradients cost
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

    def make_hook(self, index: int, large_bytes: int, /) -> Callable[..., None]:
        """Return a hook that puts ``index`` into the queue, and then tells if that is due.

        ``large_bytes`` is 0 for a gradient that is not large.
        """

    def start_copying(self, slots: list[Slot | None], factor: float, /) -> bool:
        """Let hooks copy in what has a slot, times a factor; say whether they will.

        Each once, from then on; a parameter's grad is its slot's view then.
        """

    def exclude(self, index: int, /) -> None:
        """Let the hook of one parameter copy nothing."""

    def stop_copying(self) -> None:
        """Let hooks leave gradients where they are, as they do before a step."""

    def first(self) -> int:
        """Return what came first, and leave it."""

    def take(self) -> tuple[list[int], list[int]]:
        """Remove and return what is there: all, and of these what is still to be copied in."""

    def clear(self) -> None:
        """Forget what is there."""


class PythonReadyQueue:
    """What :func:`make_ready_queue` makes where the native core is missing."""

    def __init__(self, tell: Callable[[], None], most_bytes: int) -> None:
        self.due = 1
        self._tell = tell
        self._most_bytes = most_bytes
        self._waiting_bytes = 0
        self._items: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    @never_compiled
    def make_hook(self, index: int, large_bytes: int, /) -> Callable[..., None]:
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

    def start_copying(self, _slots: list[Slot | None], _factor: float, /) -> bool:
        """Leave all gradients to the listener: a copy by torch costs the same there."""
        return False

    def exclude(self, _index: int, /) -> None:
        """No hook copies anyway."""

    def stop_copying(self) -> None:
        """None does."""

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
def make_ready_queue(listener: AutogradListener) -> ReadyQueue:
    """Make a queue that tells the listener, as long as it lives; in C if that was built."""
    reference = weakref.ref(listener)

    def tell() -> None:
        alive = reference()
        if alive is not None:
            alive.on_gradients()

    if native is None:
        return PythonReadyQueue(tell, WAITING_BYTES)
    queue: ReadyQueue = native.ReadyQueue(tell, WAITING_BYTES, tensor_exchange())
    return queue


class GradientHooks:
    """Hooks on the AccumulateGrad nodes of some parameters.

    Those that are ``large`` wait for a few others only ([Note: large gradients]). To convert a
    parameter makes autograd forget its node, and our hook with it.

    Attributes:
        nodes: Of the parameters, in their order.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], queue: ReadyQueue, large: Set[int]
    ) -> None:
        self._parameters = parameters
        self._queue = queue
        self._large = large
        self._handles: list[Any] = []
        self._are_suspect = False
        self.attach()

    def attach(self) -> None:
        """Listen at the parameters' present nodes, and no others."""
        self.remove()
        self.nodes = [_accumulate_node(parameter) for parameter in self._parameters]
        self._node_set = frozenset(self.nodes)
        for index, node in enumerate(self.nodes):
            large_bytes = self._parameters[index].nbytes if index in self._large else 0
            self._handles.append(node.register_hook(self._queue.make_hook(index, large_bytes)))

    def suspect(self) -> None:
        """The module was changed, or a step failed: look before the next forward."""
        self._are_suspect = True

    def check_suspects(self) -> None:
        """If there is reason to: see whether all parameters are still heard; else attach anew."""
        if self._are_suspect:
            self._are_suspect = False
            if not self._are_intact(range(len(self._parameters))):
                self.attach()

    def are_below(self, outputs: Iterable[Any]) -> bool:
        """Say whether one of our nodes hangs on these."""
        return is_in_graph(outputs, self._node_set)

    def attach_below(self, outputs: Iterable[Any]) -> bool:
        """Attach anew if the nodes were lost; say whether our nodes hang on ``outputs`` then.

        A module is converted as a whole: the graph has none of our nodes, and one parameter tells.
        """
        if self._are_intact((0,)):
            return False
        self.attach()
        return self.are_below(outputs)

    def _are_intact(self, indices: Iterable[int]) -> bool:
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


def output_nodes(output: Any) -> set[Any]:
    """Return the nodes at which a backward enters the graph of a forward's output."""
    return {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}


@never_compiled
def hook_outputs(
    nodes: Iterable[Any], listener: AutogradListener, *, leads_to_parameters: bool
) -> None:
    """Tell the listener when a backward reaches one of these nodes of a forward's output.

    It is also told whether parameters hang on them at all; that cannot be asked later, because
    a hook that kept its node would keep the whole graph alive.
    """

    def on_output(_: Any) -> None:
        listener.on_output(leads_to_parameters)

    for node in nodes:
        node.register_prehook(on_output)
