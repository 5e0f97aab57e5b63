"""Wrappers inside of a wrapper's module: what is said to the outer one holds for them, too.

The outer wrapper leaves their parameters to them (parameters.py), so without this ``no_sync`` and
``weighted`` would hold for a part of the model only. Called by the wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from paceline.ddp.reduce.reducer import Reducer
from paceline.errors import ConfigurationError
from paceline.torch_private import TorchDDP


def find_wrappers(module: torch.nn.Module) -> list[TorchDDP]:
    """Return the wrappers in a module, torch's and ours."""
    return [each for each in module.modules() if isinstance(each, TorchDDP)]


@contextlib.contextmanager
def without_sync(wrappers: Sequence[TorchDDP]) -> Iterator[None]:
    """Let backward passes of these wrappers stay local."""
    before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = False
        yield
    finally:
        for wrapper, synced in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync = synced


@contextlib.contextmanager
def with_weight(reducers: Sequence[Reducer], weight: float) -> Iterator[None]:
    """Let steps of these reducers count with a weight."""
    with contextlib.ExitStack() as stack:
        for reducer in reducers:
            stack.enter_context(reducer.weighted(weight))
        yield


def reducers_inside(wrappers: Sequence[TorchDDP], ours: type[TorchDDP]) -> list[Reducer]:
    """Return the reducers of wrappers that can be given a weight.

    Raises:
        ConfigurationError: If one of them is none of ``ours``.
    """
    for wrapper in wrappers:
        if not isinstance(wrapper, ours):
            raise weight_error(f"a wrapper of {type(wrapper).__module__}")
    reducers = [wrapper.reducer for wrapper in wrappers]
    return [reducer for reducer in reducers if isinstance(reducer, Reducer)]


def weight_error(what: str) -> ConfigurationError:
    """Return the error for gradients that weighted() would not reach."""
    return ConfigurationError(
        f"weighted(): this wrapper has {what} inside, which would be averaged without weights. "
        "Leave out delay_all_reduce_named_params, or wrap the whole model once."
    )
