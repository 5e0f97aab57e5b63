"""Which parameters a wrapper reduces, and what the reducer has to know of each.

Pure: reads the module. Called by the wrapper when it is built, and when it is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from paceline.buckets import ParameterSpec
from paceline.errors import ConfigurationError
from paceline.torch_private.modules import TorchDDP

Trainables = tuple[list[ParameterSpec], list[torch.nn.Parameter]]


def find_trainables(
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    ignored: Collection[str],
    reduce_dtype: Callable[[torch.Tensor], torch.dtype],
) -> Trainables:
    """List the parameters to reduce, in order of definition, each once.

    Args:
        module: The user's, without the wrapper.
        group: What the wrapper reduces over.
        ignored: Names of parameters that others take care of.
        reduce_dtype: In which dtype a parameter's gradient is reduced.

    Raises:
        ConfigurationError: If one cannot be reduced by this wrapper.
    """
    sparse = {
        id(m.weight)
        for m in module.modules()
        if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and m.sparse
    }
    specs: list[ParameterSpec] = []
    parameters: list[torch.nn.Parameter] = []
    seen = _reduced_inside(module, group)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or name in ignored or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        dtype = reduce_dtype(parameter)
        _check_dtype(name, dtype)
        is_sparse = id(parameter) in sparse
        specs.append(ParameterSpec.of(len(specs), name, parameter, dtype=dtype, sparse=is_sparse))
        parameters.append(parameter)
    return specs, parameters


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise ConfigurationError(
            f"The gradient of {name} would be reduced in {dtype}, and torch has no arithmetic for "
            "that. Choose torch.bfloat16 or torch.float16 (reduce_dtype and param_dtype of mixed "
            "precision, or the parameter's own). To send 8 bits for each value, keep the dtype and "
            "say paceline.hooks.register(model, 'e4m3')."
        )


def _reduced_inside(module: torch.nn.Module, group: dist.ProcessGroup) -> set[int]:
    """Return the ids of parameters that a wrapper inside of the module already averages.

    To average them again would change nothing, but cost as much; and two wrappers cannot both
    lend out views of their buckets.
    """
    inside: set[int] = set()
    mine = dist.get_process_group_ranks(group)
    for name, wrapper in module.named_modules():
        if not isinstance(wrapper, TorchDDP):
            continue
        if dist.get_process_group_ranks(wrapper.process_group) != mine:
            raise ConfigurationError(
                f"The module holds a DistributedDataParallel ({name or 'itself'}), over "
                "a group of other ranks. A parameter can be averaged by one wrapper only: wrap "
                "the modules beside each other, or list the inner one's parameters with "
                "_set_params_and_buffers_to_ignore_for_model."
            )
        ignored = wrapper.parameters_to_ignore
        inside.update(id(p) for n, p in wrapper.module.named_parameters() if n not in ignored)
    return inside
