"""Every name of torch's class is accounted for: ours, inherited on purpose, or out of reach."""

from __future__ import annotations

import inspect

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel

# Inherited: they work on the module, or on attributes that we have, not on torch's reducer.
INHERITED = {
    "broadcast_buffers",
    "gather",
    "scatter",
    "to_kwargs",
    "train",
    "_active_ddp_module",
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_get_active_ddp_module",
    "_get_data_parallel_params",
    "_get_parameters",
    "_inside_ddp_forward",
    "_register_fused_optim",
    "_set_params_and_buffers_to_ignore_for_model",
    "_distributed_rank",
}

# Steps of torch's own constructor, forward or join hook, which ours do not go through.
OUT_OF_REACH = {
    "_check_and_sync_module_buffers",
    "_check_comm_hook",
    "_check_global_requires_backward_grad_sync",
    "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd",
    "_clear_grad_buffer",
    "_ddp_init_helper",
    "_delayed_all_reduce_hook",
    "_find_common_rank",
    "_fire_reducer_autograd_hook",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_module_wait_for_copy_hook",
    "_passing_sync_batchnorm_handle",
    "_register_accum_grad_hook",
    "_register_delay_all_reduce_hook",
    "_root_copy_hook",
    "_run_ddp_forward",
    "_setup_in_backward_optimizers",
    "_sync_module_buffers",
}

# Arguments that torch's class has since a later version than the one that is installed may be.
SINCE_2_15 = ["lazy_bucket_allocation"]

BOILERPLATE = {"__doc__", "__module__", "__abstractmethods__", "__annotations__", "_abc_impl"}


def own_names() -> set[str]:
    ours = (
        base for base in DistributedDataParallel.__mro__ if base.__module__.startswith("paceline.")
    )
    return {name for base in ours for name in vars(base)}


def test_every_name_of_torch_is_accounted_for() -> None:
    names = set(vars(TorchDDP)) - BOILERPLATE
    assert names - own_names() == INHERITED | OUT_OF_REACH


def test_the_lists_are_disjoint_and_current() -> None:
    assert not INHERITED & OUT_OF_REACH
    assert not (INHERITED | OUT_OF_REACH) & own_names()


def test_arguments_are_those_of_torch_in_the_same_order() -> None:
    theirs = inspect.signature(TorchDDP.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        if name != "gradient_as_bucket_view":
            assert ours[name].default == parameter.default, name
    newer = [] if theirs.keys() >= set(SINCE_2_15) else SINCE_2_15
    assert list(ours)[len(theirs) :][: len(newer)] == newer
    added = [ours[name] for name in list(ours)[len(theirs) + len(newer) :]]
    assert [p.name for p in added] == [
        "nonfinite",
        "missing_gradients",
        "transport",
        "check_every",
        "shards",
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in added)


def test_public_methods_take_what_torch_takes() -> None:
    public = [n for n in vars(TorchDDP) if not n.startswith("_") and n in own_names()]
    for name in [*public, "_register_buffer_comm_hook", "_update_process_group"]:
        theirs, ours = getattr(TorchDDP, name), getattr(DistributedDataParallel, name)
        if callable(theirs) and name != "forward":
            assert list(inspect.signature(ours).parameters) == list(
                inspect.signature(theirs).parameters
            ), name


def test_is_what_isinstance_checks_look_for() -> None:
    assert issubclass(DistributedDataParallel, TorchDDP)
    assert issubclass(DistributedDataParallel, torch.nn.Module)
