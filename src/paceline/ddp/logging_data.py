"""The dictionary that ``_get_ddp_logging_data()`` returns: torch's keys, where they apply.

Filled at construction and, at sampled steps, with the times of the step before. Times are
nanoseconds, as in torch. For people there is ``ddp.stats()``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from paceline.buckets import BucketPlan
from paceline.ddp.state_names import StateNames
from paceline.errors import ConfigurationError
from paceline.observe import StepClock

if TYPE_CHECKING:
    from paceline.ddp.reduce.reducer import Reducer
    from paceline.ddp.wrapper import DistributedDataParallel

FIRST_SAMPLED_STEPS = 10
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_COMMON_ENV = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_BACKEND_ENV = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
}
GLOO_THREADS = 2


class LoggingData:
    """A dictionary with a sampling rate."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sample_rate = 100
        self._samples = 0

    def set(self, key: str, value: Any) -> None:
        """Set one entry."""
        self.values[key] = value

    def set_error(self, error: BaseException) -> None:
        """Keep the most recent error."""
        self.values["has_error"] = 1
        self.values["error"] = f"{type(error)}: {error}"
        self.values.setdefault("iteration", 0)

    def set_construction(self, ddp: DistributedDataParallel, reducer: Reducer) -> None:
        """Record what a wrapper was asked to do."""
        policy = ddp._settings.policy
        is_sync_bn = (isinstance(m, torch.nn.SyncBatchNorm) for m in ddp.module.modules())
        self.set_environment(dist.get_backend(ddp.process_group))
        self.set_parameters(reducer.parameters)
        self.set_plan(reducer.plan, rebuilt=False)
        self.values |= {
            "world_size": ddp._transport.world,
            "rank": ddp._transport.rank,
            "module_name": type(ddp.module).__name__,
            "device_ids": ", ".join(str(entry) for entry in ddp.device_ids or []),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(policy.find_unused),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view is True),
            "static_graph": int(policy.static_graph),
            "is_multi_device_module": int(ddp.is_multi_device_module),
            "has_sync_bn": int(any(is_sync_bn)),
        }

    def set_environment(self, backend: str) -> None:
        """Record the environment variables that decide how processes find each other."""
        for variable in (*_COMMON_ENV, *_BACKEND_ENV.get(backend, ())):
            self.values[variable.lower()] = os.environ.get(variable, "N/A")
        self.values["backend_name"] = backend
        if backend == "gloo":
            self.values["gloo_num_threads"] = GLOO_THREADS

    def set_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record what is reduced."""
        names = {_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters}
        self.values["dtypes"] = ", ".join(sorted(names))
        self.values["num_parameter_tensors"] = len(parameters)
        self.values["total_parameter_size_bytes"] = sum(p.nbytes for p in parameters)

    def set_plan(self, plan: BucketPlan, *, rebuilt: bool) -> None:
        """Record how gradients are cut into buckets."""
        sizes = ", ".join(str(bucket.nbytes) for bucket in plan.buckets)
        if not rebuilt:
            self.values["bucket_sizes"] = sizes
            return
        self.values["has_rebuilt_buckets"] = 1
        self.values["rebuilt_bucket_sizes"] = sizes
        self.values["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(spec.index) for spec in bucket.parameters) for bucket in plan.buckets
        )

    def set_progress(self, reducer: Reducer) -> None:
        """Record what a reducer has found out while training."""
        if reducer.planner.has_rebuilt:
            self.set_plan(reducer.plan, rebuilt=True)
            order = ", ".join(str(index) for index in reducer.plan.order())
            self.values["prev_iteration_grad_ready_order_indices"] = order
        self.values["num_buckets_reduced"] = reducer.counters.buckets_reduced
        self.values["can_set_static_graph"] = int(reducer.usage.is_static)
        self.values["unused_parameter_size"] = 0

    def is_sampled(self, iteration: int) -> bool:
        """Whether the step before this iteration is recorded."""
        return iteration > 0 and (
            iteration <= FIRST_SAMPLED_STEPS or iteration % self.sample_rate == 0
        )

    def sample(self, iteration: int, clock: StepClock) -> None:
        """Record the times of the step before ``iteration``."""
        if not clock.began or not clock.backward_ended:
            return
        self._samples += 1
        self.values["iteration"] = iteration
        comm_began, comm_ended = min(clock.began), max(clock.ended)
        overlap = max(0, min(clock.backward_ended, comm_ended) - comm_began)
        self._record("forward_compute_time", clock.backward_began - clock.forward_began)
        self._record("backward_compute_time", clock.backward_ended - clock.backward_began)
        self._record("backward_comm_time", comm_ended - comm_began)
        self._record("backward_compute_comm_overlap_time", overlap)
        self.values["forward_compute_time_start"] = clock.forward_began
        self.values["backward_compute_time_start"] = clock.backward_began
        self.values["backward_compute_time_end"] = clock.backward_ended
        self.values["backward_comm_time_start"] = comm_began
        self.values["backward_comm_time_end"] = comm_ended

    def _record(self, key: str, value: int) -> None:
        mean = self.values.get(f"avg_{key}", 0)
        self.values[key] = value
        self.values[f"avg_{key}"] = int(mean + (value - mean) / self._samples)


class LoggingNames(StateNames):
    """torch's names for it; a base of the wrapper."""

    reducer: Reducer | None  # type: ignore[assignment]
    logger: LoggingData

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return torch's logging keys; ``stats()`` is made for people."""
        if self.reducer is not None:
            self.logger.set_progress(self.reducer)
        return dict(self.logger.values)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Record times in the first ten steps, then in every ``sample_rate``-th."""
        if not _is_positive(sample_rate):
            error = ConfigurationError(
                "DDP runtime logging sample rate should be equal or greater than 1 (which records "
                f"every step), and it is {sample_rate!r}."
            )
            self.logger.set_error(error)
            raise error
        self.logger.sample_rate = sample_rate

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        error = err_type(err_msg)
        self.logger.set_error(error)
        raise error


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and value >= 1
