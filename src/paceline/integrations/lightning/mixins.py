"""What our strategies do differently from Lightning's DDP strategies: the wrapper, and its group.

Lightning is on PyPI under two names (``lightning``; ``pytorch_lightning`` with
``lightning_fabric``), with the same classes in each. So the bodies are here, without an import of
either, and the four strategies that Lightning may have to pickle are in modules of their own.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.config import BACKEND_NAME
from paceline.ddp import DistributedDataParallel
from paceline.errors import UnusedParametersError
from paceline.nn import SyncBatchNorm

if TYPE_CHECKING:
    Base: Any = object
else:
    Base = object


# Begins as Lightning's own message, which programs look for.
UNUSED_IN_LIGHTNING = (
    "It looks like your LightningModule has parameters that were not used in a training_step's "
    "loss. If that is intended: strategy='paceline_find_unused_parameters_true'."
)


class _GroupMixin(Base):
    """On CPUs the process group is ours, unless ``process_group_backend`` says otherwise."""

    root_device: torch.device
    _process_group_backend: str | None
    _ddp_kwargs: dict[str, Any]

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == "cpu":
            return BACKEND_NAME
        backend: str = super()._get_process_group_backend()
        return backend

    def _wrap(self, module: torch.nn.Module) -> DistributedDataParallel:
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        with self._construction_stream():
            return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)

    def _reduce(self, reduce: Any, tensor: Any, group: Any, op: Any) -> Any:
        """Divide a sum of integers, as Lightning does on gloo; on others it asks for ``AVG``.

        torch's gloo and our backend refuse that for integers, and numbers of samples are some.
        """
        is_whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if not is_whole or op not in ("mean", "avg") or not dist.is_initialized():
            return reduce(tensor, group, op)
        total = reduce(tensor, group, "sum")
        return total.copy_(total / dist.get_world_size(group))

    def _construction_stream(self) -> AbstractContextManager[Any]:
        """As Lightning does: DDP's side streams must not wait for the default one."""
        if self.root_device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream())


class FabricMixin(_GroupMixin):
    """For ``lightning.fabric.strategies.DDPStrategy``."""

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap the module."""
        return self._wrap(module)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks, in place."""
        return self._reduce(super().all_reduce, tensor, group, reduce_op)


class TrainerMixin(_GroupMixin):
    """For ``lightning.pytorch.strategies.DDPStrategy``."""

    # The plugin behind Trainer(sync_batchnorm=True), of the same Lightning.
    _torch_layer_sync: type
    _layer_sync: Any
    _ddp_comm_hook: Any
    _ddp_comm_state: Any
    _ddp_comm_wrapper: Any
    model: Any

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does; ``sync_batchnorm=True`` means our layers, which know CPUs."""
        is_torchs = type(self._layer_sync) is self._torch_layer_sync
        if is_torchs:
            self._layer_sync.apply = SyncBatchNorm.convert_sync_batchnorm
        super().setup(trainer)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks, in place."""
        return self._reduce(super().reduce, tensor, group, reduce_op)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return self._wrap(model)

    def _register_ddp_hooks(self) -> None:
        """Register the user's hook on any device: Lightning leaves it out on all but CUDA."""
        if self._ddp_comm_hook is None:
            return
        hook = self._ddp_comm_hook
        if self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        self.model.register_comm_hook(self._ddp_comm_state, hook)

    def on_exception(self, exception: BaseException) -> None:
        """Add Lightning's phrase and the remedy; Lightning's own text would hide the names."""
        if isinstance(exception, UnusedParametersError) and exception.args:
            exception.args = (f"{exception.args[0]} {UNUSED_IN_LIGHTNING}", *exception.args[1:])
