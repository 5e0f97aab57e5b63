"""A rank's whole state, sent to all ranks of the group: tensors as tensors, the rest as JSON.

Called by :mod:`paceline.elastic.state` when a new epoch begins and some rank does not stand where
the source stands. No pickle: what a peer sends can fill tensors and numbers, and nothing else.

[Note: what travels]
First one message of JSON that describes a tree (dicts, lists, tuples, numbers, texts, and *where* a
tensor stands in it, with its dtype and shape), then the tensors in that order. Parameters and
buffers are not part of the tree: both sides have them. A rank that joins fills them in place. A
survivor that is behind stages them, and changes its own when all have come: if the source dies
before, it still holds its step. That costs the memory of the parameters once more.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError, StateTransferError
from paceline.torch_private.autograd import stored_parts
from paceline.transport.messages import GroupMessages, broadcast_tensors

CHUNK_BYTES = 64 << 20
MAX_JSON_BYTES = 256 << 20
_PLAIN = (bool, int, float, str, type(None))


def copy_from(
    source: int,
    tensors: Sequence[torch.Tensor],
    tree: Any,
    *,
    keeps_own: bool = False,
    stages: bool = False,
) -> Any:
    """Fill ``tensors`` with the source's, and return its tree. Collective over the default group.

    Who keeps its own gets its own ``tree`` back.

    Args:
        source: Its rank.
        tensors: The same number, shapes and dtypes on every rank.
        tree: Of the source; elsewhere it is not looked at.
        keeps_own: This rank takes part, and changes nothing: it stands where the source stands.
        stages: All of it is there before the first tensor changes.
    """
    group = dist.group.WORLD
    assert group is not None
    messages = GroupMessages(group)
    is_source = messages.rank == source
    found: list[torch.Tensor] = []
    text = json.dumps([_shapes(tensors), describe(tree, found)]) if is_source else ""
    shapes, description = json.loads(broadcast_text(messages, text, source))
    _check(shapes, tensors)
    inner = found if is_source else make_tensors(description)
    is_staged = stages and not keeps_own and not is_source
    with torch.no_grad():
        what, fills = "copy of the state", not keeps_own
        into = [torch.empty_like(tensor) for tensor in tensors] if is_staged else tensors
        broadcast_tensors(messages, what, into, CHUNK_BYTES, source, fills=fills)
        broadcast_tensors(messages, what, inner, CHUNK_BYTES, source, fills=fills)
        if is_staged:
            for tensor, new in zip(tensors, into, strict=True):
                tensor.copy_(new)
    return tree if is_source or keeps_own else rebuild(description, iter(inner))


def broadcast_text(messages: GroupMessages, text: str, source: int) -> str:
    """Return the source's text, which is not empty, on every rank. Collective."""
    data = text.encode()
    size = torch.tensor([len(data)])
    messages.broadcast("size of the state", size, source)
    if not 0 < int(size) <= MAX_JSON_BYTES:
        raise StateTransferError(
            f"rank {source} announced a description of {int(size)} bytes, and "
            f"{MAX_JSON_BYTES} is the most: keep large things in tensors, not in lists"
        )
    if messages.rank == source:
        carrier = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        carrier = torch.empty(int(size), dtype=torch.uint8)
    messages.broadcast("description of the state", carrier, source)
    return carrier.numpy().tobytes().decode()


def _shapes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors]


def _check(theirs: list[Any], tensors: Sequence[torch.Tensor]) -> None:
    ours = _shapes(tensors)
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    raise StateTransferError(
        f"the state of the source does not fit: it has {len(theirs)} parameters and buffers and "
        f"this rank {len(ours)}; the first that differs is number {place}. Build the same model on "
        "every rank, also on one that joins"
    )


# --- the tree ------------------------------------------------------------------------------------


def check_travels(what: str, tree: Any) -> None:
    """Refuse a part of a state that could not be sent once ranks have died.

    Raises:
        ConfigurationError: It holds something that is neither a tensor nor plain.
    """
    try:
        describe(tree, [])
    except StateTransferError as error:
        raise ConfigurationError(f"{what} cannot be kept: {error}") from None


def describe(value: Any, found: list[torch.Tensor]) -> Any:
    """Return JSON for a value; its tensors are put into ``found``."""
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        # Not coalesced first: to add up its entries would change the bits of what comes later.
        parts = [describe(part, found) for part in stored_parts(value.detach())]
        return {"sparse": [list(value.shape), value.is_coalesced(), *parts]}
    if isinstance(value, torch.Tensor):
        found.append(value.detach())
        return {
            "tensor": [
                list(value.shape),
                str(value.dtype).removeprefix("torch."),
                str(value.device),
            ]
        }
    if isinstance(value, _PLAIN):
        return {"plain": value} if _is_json(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe(each, found) for each in value]}
    if isinstance(value, dict):
        items = [[describe(k, found), describe(v, found)] for k, v in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": items}
    if _is_numpy_number(value):
        return describe(value.item(), found)
    raise StateTransferError(
        f"a {type(value).__name__} cannot be sent to another rank: a state is made of tensors, "
        "numbers, texts, lists, tuples and dicts"
    )


def _is_numpy_number(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.number, numpy.bool_))


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or value - value == 0  # neither NaN nor infinite


def rebuild(description: Any, tensors: Any) -> Any:
    """Undo :func:`describe`, with an iterator over the tensors."""
    ((kind, content),) = description.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "sparse":
        shape, is_coalesced, *parts = content
        indices, values = (rebuild(part, tensors) for part in parts)
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=is_coalesced, check_invariants=True
        )
    if kind == "plain":
        return content
    if kind == "float":
        return float(content)
    if kind in ("dict", "counter"):
        items = {rebuild(k, tensors): rebuild(v, tensors) for k, v in content}
        return Counter(items) if kind == "counter" else items
    values = [rebuild(each, tensors) for each in content]
    return tuple(values) if kind == "tuple" else values


def make_tensors(description: Any) -> list[torch.Tensor]:
    """Make empty tensors for all that a description names, in its order."""
    ((kind, content),) = description.items()
    if kind == "tensor":
        shape, dtype, device = content
        return [torch.empty(shape, dtype=_dtype(dtype), device=device)]
    if kind == "sparse":
        return [t for part in content[2:] for t in make_tensors(part)]
    if kind in ("dict", "counter"):
        return [t for k, v in content for part in (k, v) for t in make_tensors(part)]
    if kind in ("list", "tuple"):
        return [t for each in content for t in make_tensors(each)]
    return []


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateTransferError(f"there is no dtype {name!r} here: use one torch on all ranks")
    return dtype
