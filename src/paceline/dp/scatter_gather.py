"""``scatter`` cuts inputs into one piece per replica, ``gather`` puts outputs together again.

Gradients, and gradients of gradients, flow through both: they are made of torch's own operations.
Called by :class:`paceline.dp.DataParallel` and by users.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from paceline.containers import (
    contents,
    field_names,
    is_dataclass,
    rebuild,
    tensors_in,
)
from paceline.dp.devices import DeviceLike, copy_to, parse_device, parse_devices
from paceline.errors import (
    GatherError,
    GatherKeysError,
    GatherTypeError,
    ScatterDimError,
    ScatterError,
)

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type)


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> Any:
    """Cut every tensor in ``inputs`` along ``dim``, one piece for each device.

    A batch smaller than the number of devices gives fewer pieces. Tensors without dimensions, and
    all that is no tensor, go to every replica as they are. On the device where it is, a piece is a
    view; if gradients flow through it, a copy, so that a replica may write to it.

    Args:
        inputs: A tensor, or tuples, named tuples, lists, dicts and dataclasses of them, nested.
        target_gpus: The devices, CPU entries included; torch's name for them.
        dim: The dimension to cut along.

    Returns:
        The pieces, each like ``inputs``; a tuple if ``inputs`` is a tensor, else a list.

    Raises:
        ScatterError: If tensors would be cut into different numbers of pieces.
        ScatterDimError: If a tensor does not have that dimension.
    """
    devices = parse_devices(target_gpus)
    count = _count_pieces(inputs, len(devices), dim)
    pieces = _scatter(inputs, devices[:count], dim)
    return tuple(pieces) if isinstance(inputs, torch.Tensor) else pieces


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Scatter positional and keyword arguments together: both have as many pieces.

    Nothing to scatter at all gives no piece.
    """
    if not inputs and not kwargs:
        return (), ()
    pieces = scatter((tuple(inputs), dict(kwargs or {})), target_gpus, dim)
    return tuple(args for args, _ in pieces), tuple(kwargs for _, kwargs in pieces)


def _count_pieces(inputs: Any, devices: int, dim: int) -> int:
    """How many pieces all tensors can be cut into; empty ones follow the others."""
    shapes: dict[int, torch.Size] = {}
    is_any_empty = False
    for tensor in tensors_in(inputs):
        if tensor.dim() == 0:
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise ScatterDimError(
                f"Dimension out of range (expected to be in range of [{-tensor.dim()}, "
                f"{tensor.dim() - 1}], but got {dim}): inputs are cut along dimension {dim}, which "
                f"a tensor of shape {tuple(tensor.shape)} does not have. Give the wrapper another "
                "dim, or keep the tensor as an attribute of the module."
            )
        size = tensor.size(dim)
        is_any_empty |= size == 0
        if size:
            each = -(-size // devices)
            shapes.setdefault(-(-size // each), tensor.shape)
    if len(shapes) > 1:
        raise _different_counts(shapes, devices, dim)
    return next(iter(shapes), 1 if is_any_empty else devices)


def _different_counts(shapes: dict[int, torch.Size], devices: int, dim: int) -> ScatterError:
    found = ", ".join(f"{tuple(shape)} into {count}" for count, shape in shapes.items())
    return ScatterError(
        f"Over {devices} devices along dimension {dim}, the inputs' tensors would be cut into "
        f"different numbers of pieces, and parts of the batch would be lost: {found}. Give all of "
        "them the same batch size: expand() what is the same for every sample, and use "
        "unsqueeze-free scalars (0 dimensions) for constants."
    )


def _scatter(value: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return _cut(value, devices, dim)
    if isinstance(value, PackedSequence):
        raise ScatterError(
            "A PackedSequence cannot be cut along its batch. Pass the padded batch and its "
            "lengths, and pack inside of the module (pad with total_length= on the way out)."
        )
    parts = contents(value)
    if parts is None:
        return [value for _ in devices]
    columns = [_scatter(part, devices, dim) for part in parts]
    if is_dataclass(value) and all(
        piece is part for column, part in zip(columns, parts, strict=True) for piece in column
    ):
        return [value for _ in devices]  # settings and the like: no tensor inside, stays itself
    return [rebuild(value, [column[i] for column in columns]) for i in range(len(devices))]


def _cut(tensor: torch.Tensor, devices: Sequence[torch.device], dim: int) -> list[torch.Tensor]:
    if tensor.dim() == 0 or len(devices) == 1:
        pieces: Sequence[torch.Tensor] = [tensor for _ in devices]
    else:
        pieces = tensor.chunk(len(devices), dim)
        if torch.is_grad_enabled() and tensor.requires_grad:
            # Autograd refuses writes to one of several views; and replicas would race in its graph.
            pieces = [piece.clone() for piece in pieces]
        else:
            # A replica's write must not count as one to the others' pieces: .data counts anew.
            pieces = [piece.data for piece in pieces]
    return [copy_to(piece, device) for piece, device in zip(pieces, devices, strict=True)]


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Put the outputs of replicas together on one device, tensors along ``dim``.

    Args:
        outputs: One output per replica: tensors, or the same nest of tuples, named tuples, lists,
            dicts and dataclasses of them. None, and plain values that are equal on every replica,
            stay what they are.
        target_device: Where the result lies.
        dim: Along which tensors are concatenated. Scalars become a vector, with a warning.

    Raises:
        GatherError: If shapes do not fit together.
        GatherKeysError: If containers have different lengths or keys.
        GatherTypeError: If replicas returned what cannot be put together.
    """
    return _gather(list(outputs), parse_device(target_device), dim)


def _gather(outputs: list[Any], device: torch.device, dim: int) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return _concatenate(outputs, device, dim)
    kinds = {type(output) for output in outputs}
    if len(kinds) > 1:
        names = ", ".join(f"{type(out).__name__} from {i}" for i, out in enumerate(outputs))
        raise GatherTypeError(
            f"Replicas returned different things in the same place: {names}. Return the same type "
            "from every replica."
        )
    parts = contents(first)
    if parts is None:
        return _same_value(outputs)
    rows = [_contents_like(first, output, i) for i, output in enumerate(outputs)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    return rebuild(first, [_gather(column, device, dim) for column in columns])


def _contents_like(first: Any, output: Any, replica: int) -> list[Any]:
    """Return the contents in the order of the first replica's container."""
    if isinstance(first, dict):
        mine, theirs = list(first), list(output)
    elif is_dataclass(first):
        mine, theirs = field_names(first), field_names(output)
    else:
        mine, theirs = list(range(len(first))), list(range(len(output)))
    if len(mine) != len(theirs) or set(mine) != set(theirs):
        what = "keys" if isinstance(first, dict) else "entries"
        same = "All dicts must have the same number of keys" if what == "keys" else "Other contents"
        raise GatherKeysError(
            f"{same}: replica 0 returned a {type(first).__name__} with the {len(mine)} {what} "
            f"{mine}, replica {replica} one with the {len(theirs)} {what} {theirs}. Return the "
            f"same {what} from every replica."
        )
    if isinstance(first, dict):
        return [output[key] for key in first]
    return contents(output) or []


def _same_value(outputs: list[Any]) -> Any:
    first = outputs[0]
    if all(output is first for output in outputs):
        return first
    if isinstance(first, _PLAIN) and all(output == first for output in outputs):
        return first
    shown = ", ".join(f"{output!r:.60} from replica {i}" for i, output in enumerate(outputs))
    raise GatherTypeError(
        f"Values of type {type(first).__name__} cannot be put together: {shown}. Return tensors, "
        "or a value that is equal on every replica."
    )


def _concatenate(outputs: list[Any], device: torch.device, dim: int) -> torch.Tensor:
    tensors = [out for out in outputs if isinstance(out, torch.Tensor)]
    if len(tensors) < len(outputs):
        names = ", ".join(f"{type(out).__name__} from {i}" for i, out in enumerate(outputs))
        raise GatherTypeError(
            f"Some replicas returned a tensor and some did not: {names}. Return a tensor from each."
        )
    moved = [copy_to(tensor, device) for tensor in tensors]
    if dim == 0 and all(tensor.dim() == 0 for tensor in moved):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will "
            f"instead unsqueeze and return a vector, with one entry for each of {len(moved)} "
            "replicas. Take its mean() or sum(), or return a tensor with a batch dimension.",
            UserWarning,
            stacklevel=2,
        )
        return torch.stack(moved)
    try:
        return torch.cat(moved, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(f"{tuple(t.shape)} from replica {i}" for i, t in enumerate(moved))
        raise GatherError(
            f"Outputs do not fit together along dimension {dim}: {shapes}. They may differ in that "
            f"dimension only; pad them to one size inside of the module. ({error})"
        ) from error
