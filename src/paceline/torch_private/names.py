"""The private names of torch, each with what Paceline needs it for; and what stands for one that
is gone.

A name is looked up once, when the file that uses it is imported. If this torch does not have it,
the import goes on, and what needs the name raises :class:`~paceline.errors.TorchNameError` when it
is used: all else works. Other names, of objects and classes, are listed so that :func:`missing` can
tell of them. Knows no feature but by its title.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

from paceline.errors import TorchNameError
from paceline.torch_private.versions import REMEDY

FUNCTIONS = {
    "torch._C._will_engine_execute_node": "every backward of DistributedDataParallel",
    "torch._C._current_graph_task_id": "every backward of DistributedDataParallel",
    "torch._C._functorch.peek_interpreter_stack": "torch.func through a wrapper",
    "torch._C._storage_Use_Count": "every backward of DistributedDataParallel",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "torch.compile",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "torch.compile",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "torch.compile",
    "torch._C._dynamo.eval_frame._FrameAction": "torch.compile",
    "torch._disable_dynamo": "torch.compile",
    "torch.autograd._unsafe_preserve_version_counter": "mixed_precision",
    "torch._foreach_copy_": "parameters that replicas share (DataParallel)",
    "torch.nn.utils.stateless._functional_call": "torch.func.functional_call",
    "torch.distributed.autograd._is_valid_context": "DDP under distributed autograd",
    "torch.distributed.autograd._current_context": "DDP under distributed autograd",
    "torch.distributed.rpc.api._is_current_rpc_agent_set": "DDP under distributed autograd",
    "torch.distributed.distributed_c10d._get_default_group": "every wrapper and group",
    "torch.distributed.distributed_c10d._rank_not_in_group": "_update_process_group",
    "torch.distributed.distributed_c10d._set_pg_timeout": "elastic jobs",
    "torch._utils._get_device_index": "device_ids",
    "torch.distributed.utils._to_kwargs": "device_ids",
    "torch.distributed.utils._cast_forward_inputs": "mixed_precision",
    "torch._C._get_privateuse1_backend_name": "torch's SyncBatchNorm",
    "torch._embedding_bag": "ps.EmbeddingBag",
    "torch.autograd._profiler_enabled": "events for torch.profiler",
    "torch._C._profiler._RecordFunctionFast": "events for torch.profiler",
}
"""Bound at import by :func:`find`."""

METHODS = {
    "torch.autograd.Variable._execution_engine.queue_callback": "every backward of "
    "DistributedDataParallel",
    "torch.UntypedStorage._cdata": "every backward of DistributedDataParallel",
    "torch._foreach_add_": "logical shards",
    "torch._foreach_mul_": "every backward of DistributedDataParallel",
    "torch.Tensor._nnz": "sparse gradients",
    "torch.Tensor._indices": "elastic training with sparse optimizer states",
    "torch.Tensor._values": "elastic training with sparse optimizer states",
    "torch.Tensor._post_accumulate_grad_hooks": "logical shards",
    "torch.Tensor._backward_hooks": "logical shards",
    "torch.nn.Module._replicate_for_data_parallel": "DataParallel",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": "communication hooks, drift",
    "torch.distributed.ProcessGroup._set_default_backend": "the backend paceline",
    "torch.distributed.ProcessGroup._register_backend": "the backend paceline",
    "torch.distributed.ProcessGroup._get_backend": "time-outs of groups",
    "torch.distributed.ProcessGroup._device_types": "time-outs of groups",
    "torch.distributed.ProcessGroupGloo._Options": "the backend paceline",
    "torch.distributed.distributed_c10d._world.pg_map": "communication hooks, drift",
    "torch.distributed.distributed_c10d._world.pg_names": "names of groups in reports",
    "torch.distributed.distributed_c10d._world.group_count": "elastic jobs",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "device_mesh",
    "torch.distributed.rendezvous._rendezvous_handlers": "private stores of elastic jobs",
    "torch.distributed.algorithms.join.Join._get_num_nonjoined_procs": "ddp.join()",
    "torch.autograd.profiler.record_function._call_end_callbacks_on_future": "events for "
    "torch.profiler",
    "torch._C._distributed_c10d._dump_fr_trace": "the flight recorder",
    "torch._C._distributed_c10d._dump_fr_trace_json": "the flight recorder",
    "torch.nn.parallel.distributed._BufferCommHookLocation": "every wrapper",
    "torch.nn.parallel.distributed._MixedPrecision": "every wrapper",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "every wrapper",
    "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES": "torch.compile",
    "torch.nn.modules.batchnorm._BatchNorm": "nn.SyncBatchNorm",
    "torch.utils._pytree.SUPPORTED_NODES": "tensors in containers that a program has registered",
    "torch.ops.aten._embedding_bag_backward": "ps.EmbeddingBag",
    "torch.ops.aten._embedding_bag_dense_backward": "ps.EmbeddingBag",
    "torch.ops.aten._embedding_bag_per_sample_weights_backward": "ps.EmbeddingBag",
}
"""Of objects and classes: used where they are, without a substitute."""


class _Absent:
    """Stands for a name that is gone; whatever is done with it says which and what for."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise self._error()

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()

    def __instancecheck__(self, instance: Any) -> NoReturn:
        raise self._error()

    def _error(self) -> TorchNameError:
        return TorchNameError(
            f"torch {torch.__version__} has no {self._path}, which Paceline needs for: "
            f"{FUNCTIONS[self._path]}. {REMEDY}"
        )


def find(path: str) -> Any:
    """The object of a name in :data:`FUNCTIONS`, or what stands for it if it is gone."""
    assert path in FUNCTIONS, path
    found, is_there = _look_up(path)
    return found if is_there else _Absent(path)


def is_there(found: Any) -> bool:
    """Whether :func:`find` has found a name."""
    return type(found) is not _Absent


def missing() -> dict[str, str]:
    """The names that this torch does not have, with what needs each."""
    known = FUNCTIONS | METHODS
    return {path: feature for path, feature in known.items() if not _look_up(path)[1]}


def _look_up(path: str) -> tuple[Any, bool]:
    """Import nothing: a part of torch that is not there yet is taken from ``sys.modules``."""
    found: Any = torch
    parts = path.split(".")[1:]
    for depth, name in enumerate(parts, start=2):
        try:
            found = getattr(found, name)
        except AttributeError:
            module = sys.modules.get(".".join(["torch", *parts[: depth - 1]]))
            if module is None:  # or the package has something else of the module's name
                above = sys.modules.get(".".join(["torch", *parts[: depth - 2]]))
                module = getattr(above, name, None)
            if module is None:
                return None, False
            found = module
    return found, True
