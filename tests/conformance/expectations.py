"""The tests that are not expected to simply pass: the one table to read.

A test that is in neither table must pass as it is. `test_expectations.py` checks that these tables
name only tests that torch has, and that what passes with torch's own class is not left out.
"""

from __future__ import annotations

from enum import Enum

from .baseline import installed_torch


class Reason(Enum):
    """Why a test is left out. All but the last hold for every class on a CPU, torch's included."""

    NCCL = "needs NCCL"
    GPU_FACT = "asserts a fact that only a GPU can make true"
    BROKEN_IN_TORCH = "fails in this torch with any class; torch skips it by name"
    TORCH_INTERNAL = "is about torch's C++ reducer or logger, which Paceline does not have"


# The only reason to leave out a test that torch's class passes. One test has it.
MAY_PASS_WITH_TORCH = Reason.TORCH_INTERNAL


LEFT_OUT: dict[str, tuple[Reason, str]] = {
    "test_ddp_device": (Reason.GPU_FACT, "inputs arrive on the device with the index of the rank"),
    "test_ddp_logging_data_gpu": (Reason.GPU_FACT, "the logged device_ids are the rank's GPU"),
    "test_ddp_profiling_execution_trace": (Reason.NCCL, "asserts that the backend is NCCL"),
    "test_ddp_has_finalized": (
        Reason.NCCL,
        "one rank never reduces, and backward must return on the other all the same",
    ),
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": (
        Reason.TORCH_INTERNAL,
        "hands ddp.logger to torch's C++, which wants a c10d::Logger; torch skips it on Linux",
    ),
    "test_ddp_hook_pickling_powerSGD": (
        Reason.BROKEN_IN_TORCH,
        "loads a PowerSGD state with torch.load, whose weights_only default refuses it",
    ),
}

# Tests that a later torch has repaired: since then they must pass.
REPAIRED = {"test_ddp_hook_pickling_powerSGD": (2, 15)}
for name, since in REPAIRED.items():
    if tuple(map(int, installed_torch().split(".")[:2])) >= since:
        del LEFT_OUT[name]

# Tests that expect torch's timing for parameters without a gradient: the backward in which they are
# missing says nothing, and the next forward raises. They run with `missing_gradients="wait"`.
OVER_THE_GROUP: frozenset[str] = frozenset(
    {"test_ddp_profiling_autograd_profiler", "test_ddp_profiling_torch_profiler"}
)
"""Run with ``transport="c10d"``: they ask the profiler for events that gloo itself records. Ours
are called ``shm:all_reduce`` (tests/ddp/reduce/test_profiler.py)."""

WAITS: frozenset[str] = frozenset(
    {
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_multiple_nested_unused_params_err_ignore_params",
        "test_ddp_multiple_nested_unused_params_error",
        "test_ddp_unused_params_rebuild_buckets_exception",
        "test_invalid_static_graph",
    }
)
