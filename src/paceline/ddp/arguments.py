"""The constructor's arguments, checked: each wrong one has an error that says what to write
instead.

Pure checks, called by the wrapper before it does anything else.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedParameter

from paceline.errors import (
    ConfigurationError,
    GroupNotReadyError,
    MeshError,
    UntrainableModuleError,
)
from paceline.torch_private import default_group, device_index


def choose_group(process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group to reduce over.

    Raises:
        GroupNotReadyError: If torch.distributed is not initialised.
        ConfigurationError: If both arguments are given, or the mesh is not 1-D.
    """
    if process_group is not None and device_mesh is not None:
        raise MeshError(
            "Cannot specify both process_group and device_mesh arguments: a mesh brings its own "
            "group. Leave one of them out."
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise MeshError(
                f"Only 1D device mesh is supported, but got {device_mesh}. Pass one of its "
                "dimensions, for example device_mesh['dp']."
            )
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    if not dist.is_initialized():
        raise GroupNotReadyError(
            "There is no process group: torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group('gloo') on every rank before "
            "DistributedDataParallel is constructed ('nccl' for CUDA), and start the ranks with "
            "torchrun."
        )
    if process_group is None:
        return default_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigurationError(
            f"process_group is {process_group!r}, which is no process group of this rank. Pass "
            "what torch.distributed.new_group() returned, only on the ranks that are in it."
        )
    return process_group


def check_parameters(parameters: Sequence[torch.Tensor], *, some_delayed: bool) -> None:
    """Refuse modules that cannot be trained."""
    for parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            raise UntrainableModuleError(
                "The module has parameters without a shape (a lazy module that has not seen an "
                "input). Run one batch through the module on every rank, then wrap it in "
                "DistributedDataParallel."
            )
    if not any(parameter.requires_grad for parameter in parameters) and not some_delayed:
        raise UntrainableModuleError(
            "The module has no parameter that requires a gradient, so there is nothing to reduce. "
            "Use it without DistributedDataParallel, or set requires_grad on what shall be trained "
            "before it is wrapped."
        )


@dataclass(frozen=True)
class Placement:
    """Where the module and its outputs live."""

    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    is_multi_device: bool


def choose_placement(
    parameters: Sequence[torch.Tensor], device_ids: Sequence[Any] | None, output_device: Any
) -> Placement:
    """Check devices against ``device_ids`` and ``output_device``.

    Raises:
        ConfigurationError: If they do not fit the module.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigurationError(
            f"device_ids={list(device_ids)} names several devices, but one process drives one "
            "replica: pass a single one, or None for a module that is spread over devices."
        )
    types = sorted({parameter.device.type for parameter in parameters})
    if len(types) != 1:
        raise ConfigurationError(
            f"The module's parameters lie on devices of several types: {', '.join(types)}. Move "
            "all of it to one type, for example module.to('cpu'), before it is wrapped."
        )
    devices = {parameter.device for parameter in parameters}
    device = parameters[0].device
    if not device_ids or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ConfigurationError(
                f"device_ids={device_ids} and output_device={output_device} only work for a module "
                f"on a single accelerator, but its parameters are on {sorted(map(str, devices))}. "
                "Leave both out: DistributedDataParallel(module)."
            )
        return Placement(device, None, None, len(devices) > 1)
    output = device_ids[0] if output_device is None else output_device
    ids = [device_index(entry) for entry in device_ids]
    return Placement(device, ids, device_index(output), False)


@dataclass(frozen=True)
class BufferArguments:
    """When buffers are synchronised."""

    in_forward: bool
    at_construction: bool


def choose_buffers(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> BufferArguments:
    """Translate the new argument and the deprecated one, with torch's warnings."""
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            _deprecate(
                "`broadcast_buffers` and `forward_sync_buffers` were both given. "
                "`broadcast_buffers` is deprecated and is ignored here; leave it out."
            )
        return BufferArguments(forward_sync_buffers, at_construction=True)
    if broadcast_buffers is None:
        return BufferArguments(in_forward=True, at_construction=True)
    _deprecate(
        "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; note that "
        "`forward_sync_buffers=False` still makes buffers equal at construction, while "
        "`broadcast_buffers=False` does not."
    )
    return BufferArguments(broadcast_buffers, at_construction=broadcast_buffers)


def warn_check_reduction() -> None:
    """``check_reduction`` has had no effect for years."""
    _deprecate("`check_reduction` is deprecated and has no effect. Leave it out.")


def _deprecate(message: str) -> None:
    warnings.warn(message, FutureWarning, stacklevel=4)
