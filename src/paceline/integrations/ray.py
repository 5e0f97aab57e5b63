"""Ray Train: ``TorchTrainer(..., torch_config=paceline.integrations.ray.TorchConfig())``.

``ray.train.torch.prepare_model`` has bound torch's DDP when Ray was imported. Around the training
function, on each worker, that name means ours. On workers without accelerators the process group
is the backend ``paceline``.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

from ray.train.torch import TorchConfig as RayTorchConfig
from ray.train.torch.config import TorchConfigContextManager, _TorchBackend

from paceline.config import BACKEND_NAME

__all__ = ["TorchConfig"]

# Where prepare_model is, in both generations of Ray Train; one of them may go.
_MODULES = ("ray.train.v2.torch.train_loop_utils", "ray.train.torch.train_loop_utils")
AUTO = "auto"
_NAME = "DistributedDataParallel"


@dataclass
class TorchConfig(RayTorchConfig):
    """Ray's TorchConfig; ``prepare_model`` wraps in Paceline's DistributedDataParallel.

    Args:
        backend: As Ray's. ``"auto"``: ``paceline`` on workers without accelerators, Ray's choice
            on others.
        init_method: As Ray's.
        timeout_s: As Ray's.
        wrapper_options: Arguments for the wrapper: ``{"nonfinite": "raise"}``. Those in
            ``prepare_model(parallel_strategy_kwargs=...)`` come on top.

    Example::

        TorchTrainer(train, torch_config=TorchConfig(), scaling_config=ScalingConfig(num_workers=2))
    """

    # Not None: TorchTrainer would make gloo of it.
    backend: str | None = AUTO
    wrapper_options: dict[str, Any] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type:
        """What sets up the workers."""
        return TorchSetup

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """What is around the training function, on each worker."""
        return partial(WrapsInOurs, self.wrapper_options)


class TorchSetup(_TorchBackend):
    """Ray's, with our process group where it would choose gloo."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        resources = worker_group.get_resources_per_worker()
        if backend_config.backend == AUTO:
            backend_config = copy.copy(backend_config)
            backend_config.backend = None if has_accelerator(resources) else BACKEND_NAME
        super().on_start(worker_group, backend_config)


def has_accelerator(resources: dict[str, float]) -> bool:
    """Whether workers with these resources train on something else than CPUs."""
    return resources.get("GPU", 0) > 0 or resources.get("TPU", 0) > 0


class WrapsInOurs(TorchConfigContextManager):
    """Inside of it Ray's ``prepare_model`` wraps in our class; the name is given back at the end.

    Args:
        wrapper_options: Arguments for the wrapper.
    """

    def __init__(self, wrapper_options: dict[str, Any]) -> None:
        self._options = wrapper_options
        self._before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        from paceline.ddp import DistributedDataParallel

        super().__enter__()
        wrap = partial(DistributedDataParallel, **self._options)
        update_wrapper(wrap, DistributedDataParallel)  # Ray logs the name
        for module in map(importlib.import_module, _MODULES):
            self._before.append((module, getattr(module, _NAME)))
            setattr(module, _NAME, wrap)

    def __exit__(self, *exception: Any) -> bool:
        while self._before:
            module, before = self._before.pop()
            setattr(module, _NAME, before)
        return bool(super().__exit__(*exception))
