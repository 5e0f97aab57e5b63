"""The constructor's arguments, checked: each wrong one has an error that says what to write
instead.

Pure checks, called by the wrapper before it does anything else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedParameter

from paceline.config import TRANSPORT_VARIABLE, NonFinite, TransportChoice, parse_choice
from paceline.errors import (
    ConfigurationError,
    GroupNotReadyError,
    MeshError,
    UntrainableModuleError,
)
from paceline.torch_private.groups import default_group, is_slice
from paceline.torch_private.modules import device_index, knows_sync_batch_norm

# Bound at import: torch's own tests put our class in the place of that name.
_TORCHS_NORM = torch.nn.SyncBatchNorm.forward


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
            "Default process group has not been initialized, please make sure to call "
            "init_process_group: torch.distributed has no group to reduce over. Call "
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
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the "
                "modules: a lazy module's parameters have no shape before it has seen an input. "
                "Run one batch through the module on every rank, then wrap it."
            )
    _check_data(parameters)
    if not any(parameter.requires_grad for parameter in parameters) and not some_delayed:
        raise UntrainableModuleError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient. Use it as it is, or set requires_grad "
            "on what shall be trained before it is wrapped."
        )


def _check_data(parameters: Sequence[torch.Tensor]) -> None:
    if parameters and all(parameter.is_meta for parameter in parameters):
        raise UntrainableModuleError(
            "The module's parameters are on the meta device: they have shapes and no data. Call "
            "module.to_empty(device='cpu') and initialise or load the parameters, on every rank, "
            "before it is wrapped."
        )
    if any(parameter.is_inference() for parameter in parameters):
        raise UntrainableModuleError(
            "The module was built under torch.inference_mode(), so autograd can never give its "
            "parameters gradients. Build it outside of that, or copy it: "
            "module.load_state_dict(...) into a module that was."
        )


def check_norms(module: torch.nn.Module) -> None:
    """Refuse torch's SyncBatchNorm where it has no kernels: name ours."""
    for name, part in module.named_modules():
        if type(part).forward is not _TORCHS_NORM:
            continue
        tensors = [*part.parameters(), *part.buffers()]
        if tensors and not knows_sync_batch_norm(tensors[0].device):
            raise ConfigurationError(
                "SyncBatchNorm layers only work with GPU modules if they are torch's, and "
                f"{name or 'the module'} is on {tensors[0].device}. Paceline's work on CPUs: "
                "module = paceline.nn.SyncBatchNorm.convert_sync_batchnorm(module)."
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
            f"device_ids can only be None or contain a single element, but it is "
            f"{list(device_ids)}: one process drives one replica. Pass a single device, or None "
            "for a module that is spread over several."
        )
    types = sorted({parameter.device.type for parameter in parameters})
    if len(types) != 1:
        raise ConfigurationError(
            "DistributedDataParallel's input module must be on the same type of devices, but "
            f"input module parameters locate in {', '.join(types)}. Move all of it to one type, "
            "for example module.to('cpu'), before it is wrapped."
        )
    devices = {parameter.device for parameter in parameters}
    device = parameters[0].device
    if not device_ids or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ConfigurationError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters on "
                f"{sorted(map(str, devices))}. Leave both out: DistributedDataParallel(module)."
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
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, shards: object
) -> BufferArguments:
    """Translate the new argument and the deprecated one, with torch's warnings.

    With shards, buffers are combined after each loop over them.
    """
    if shards is not None:
        return BufferArguments(in_forward=False, at_construction=broadcast_buffers is not False)
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            _deprecate(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
                "`broadcast_buffers` is deprecated and its value is ignored; leave it out."
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


def choose_interval(check_every: int | None) -> int:
    """Translate ``check_every``; 0 stands for never.

    Raises:
        ConfigurationError: If it is no interval.
    """
    if check_every is None:
        return 0
    if check_every < 1:
        raise ConfigurationError(
            f"check_every={check_every} is no interval. Pass a number of steps, for example "
            "check_every=100, or leave it out to compare never."
        )
    return check_every


def warn_check_reduction(check_reduction: bool) -> None:
    """Warn of an argument that has had no effect for years."""
    if check_reduction:
        _deprecate(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated and "
            "has no effect. Leave it out."
        )


def warn_unused_and_static(find_unused: bool, static_graph: bool) -> None:
    """Warn whoever asks for both: the first static step finds the unused parameters."""
    if find_unused and static_graph:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel, and a static "
            "graph: that finds unused parameters by itself. Leave find_unused_parameters out.",
            stacklevel=3,
        )


def _deprecate(message: str) -> None:
    warnings.warn(message, FutureWarning, stacklevel=4)


def check_delayed(given: Mapping[str, Any]) -> None:
    """Refuse settings that delayed parameters, which are averaged apart, could not follow.

    Args:
        given: The constructor's arguments, by their names.

    Raises:
        ConfigurationError: If there is one, or if only one of the two arguments for delayed
            parameters is given.
    """
    delayed = given["delay_all_reduce_named_params"]
    if (delayed is None) != (given["param_to_hook_all_reduce"] is None):
        raise ConfigurationError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time: the second says when the first are reduced. Give both, or neither."
        )
    nonfinite = given["nonfinite"]
    other = f"nonfinite={nonfinite!r}" if nonfinite != NonFinite.IGNORE.value else ""
    if given["mixed_precision"] is not None:
        other = "mixed_precision"
    if delayed is not None and other:
        raise ConfigurationError(
            f"{other} and delay_all_reduce_named_params exclude each other: delayed gradients are "
            "averaged apart from the others, in the parameters' own dtype, before anybody knows "
            "whether all are finite. Leave one of the two out."
        )


def prepare_mesh(module: torch.nn.Module, device_mesh: Any) -> None:
    """A slice of a larger mesh means tensor parallelism inside: convert the module's parameters."""
    if device_mesh is not None and is_slice(device_mesh):
        from paceline.torch_private.tensor_parallel import convert_module

        convert_module(module)


def choose_transport(transport: str) -> TransportChoice:
    """What the argument says; ``"auto"`` leaves it to the environment, if that says something.

    Raises:
        ConfigurationError: Neither is known.
    """
    if transport != TransportChoice.AUTO.value:
        return parse_choice(TransportChoice, "transport", transport)
    found = os.environ.get(TRANSPORT_VARIABLE) or transport
    return parse_choice(TransportChoice, TRANSPORT_VARIABLE, found)
