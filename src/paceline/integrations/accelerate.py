"""Accelerate: ``from paceline.integrations.accelerate import Accelerator``.

Accelerate looks torch's name up when it wraps a model, and has no other place to put a wrapper in.
So the name means ours for as long as that takes. On CPUs it knows gloo and MPI only; while our
accelerator is made, the backend ``paceline`` is known too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import accelerate
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from paceline.config import BACKEND_NAME
from paceline.ddp import DistributedDataParallel

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator with Paceline's wrapper. Takes its arguments, and one of ours.

    On CPUs the process group is the backend ``paceline``, unless there is a group already or
    ``InitProcessGroupKwargs(backend="gloo")`` asks for another. ``join_uneven_inputs`` works on
    CPUs, where Accelerate's own has no effect.

    Args:
        args: As Accelerate's.
        wrapper_options: Arguments for the wrapper that Accelerate's
            ``DistributedDataParallelKwargs`` does not have: ``{"nonfinite": "raise"}``.
        kwargs: As Accelerate's.

    Example::

        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    # While true, a method of Accelerate's takes CPUs for devices that it knows how to join.
    _is_entering_join = False

    def __init__(
        self, *args: Any, wrapper_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._wrapper_options = dict(wrapper_options or {})
        with backend_allowed():
            super().__init__(*args, **kwargs)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerate does, in our wrapper."""
        with _name_means(partial(DistributedDataParallel, **self._wrapper_options)):
            return super().prepare_model(model, *args, **kwargs)

    @property
    def multi_device(self) -> bool:
        """As Accelerate's: whether there are several accelerators."""
        return self._is_entering_join or bool(super().multi_device)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let ranks that run out of batches take part in the others' collectives, on CPUs too."""
        with contextlib.ExitStack() as stack:
            self._is_entering_join = self.distributed_type == DistributedType.MULTI_CPU
            try:
                stack.enter_context(super().join_uneven_inputs(joinables, even_batches))
            finally:
                self._is_entering_join = False
            yield


@contextlib.contextmanager
def _name_means(wrapper: Any) -> Iterator[None]:
    before = torch.nn.parallel.DistributedDataParallel
    torch.nn.parallel.DistributedDataParallel = wrapper  # type: ignore[misc]
    try:
        yield
    finally:
        torch.nn.parallel.DistributedDataParallel = before  # type: ignore[misc]


@contextlib.contextmanager
def backend_allowed() -> Iterator[None]:
    """Let Accelerate make groups of our backend on CPUs: if asked to, or if nothing is said."""
    choose = PartialState._prepare_backend

    def choose_ours(
        state: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, Any]:
        is_free = backend in (None, BACKEND_NAME)
        chosen, kind = choose(state, cpu, sagemaker_dp, None if is_free else backend)
        return (BACKEND_NAME if is_free and kind == DistributedType.MULTI_CPU else chosen), kind

    PartialState._prepare_backend = choose_ours
    try:
        yield
    finally:
        PartialState._prepare_backend = choose
