"""Between a wrapper and the recorder of its process (:mod:`paceline.observe.recorder`).

Called by the wrapper when it is made, by its forwards, and when it changes its group. The reducer
knows none of this: it moves a clock on.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.containers import tensors_in
from paceline.cores import allowed_cores, core_list
from paceline.ddp.autograd.optimizer_steps import observe_optimizers
from paceline.ddp.reduce.reducer import Reducer
from paceline.ddp.stall_probe import watch_for_stalls
from paceline.observe.recording import Wrapper, active_recorder, note, watch_wrapper
from paceline.observe.records import RankInfo
from paceline.observe.run_folder import RUN_DIR, recorded_rank
from paceline.observe.step_clock import StepObserver
from paceline.processes import host_name
from paceline.torch_private.autograd import is_inside_backward
from paceline.types import Transport


def watch_reducer(reducer: Reducer, transport: Transport, module: torch.nn.Module) -> None:
    """Let the recorder follow a wrapper's steps, if there is one or as soon as there is one.

    Where it writes into a run folder, the watchdog looks after the wrapper, too.
    """
    # Weakly: it would keep its group, whose end would be waited for in a forked child.
    who = partial(identify, weakref.ref(transport))
    wrapper = Wrapper(reducer.parameters, who, observe_optimizers)
    watch_wrapper(reducer.clock, wrapper)
    folder = os.environ.get(RUN_DIR)
    if folder and active_recorder() is not None:
        watch_for_stalls(reducer, module, folder, recorded_rank(dist.get_rank()))


def identify(transport_ref: weakref.ref[Transport]) -> RankInfo:
    """Say which rank of the whole job this is, and what its gradients travel over by now."""
    transport = transport_ref()
    return RankInfo(
        rank=recorded_rank(dist.get_rank()),
        local_rank=int(os.environ.get("LOCAL_RANK", dist.get_rank())),
        world=dist.get_world_size(),
        host=host_name(),
        pid=os.getpid(),
        threads=torch.get_num_threads(),
        cores=allowed_cores(),
        core_list=core_list(),
        transport=transport.name if transport else "",
        transport_reason=transport.reason if transport else "",
        wall_minus_monotonic_ns=time.time_ns() - time.perf_counter_ns(),
    )


def note_error(keep: Callable[[BaseException], None], error: BaseException) -> None:
    """Keep an error of a step, and note it for whoever reads the run folder."""
    keep(error)
    note("error", f"{type(error).__name__}: {error}")


def note_group(transport: Transport) -> None:
    """The wrapper goes on with another group."""
    note("group", f"goes on as rank {transport.rank} of {transport.world}")


def tell_forward(observer: StepObserver, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward begins. One inside of a backward (checkpointing) is part of that."""
    if not is_inside_backward():
        is_training = torch.is_grad_enabled()
        observer.on_forward(batch_size(inputs, kwargs), is_training=is_training)


def batch_size(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Guess how many samples a forward has: the first dimension of its first tensor; else 0."""
    first = inputs[0] if inputs else None
    if isinstance(first, torch.Tensor) and (shape := first.shape):  # nearly always
        return shape[0]
    sizes = (each.size(0) for each in tensors_in((inputs, kwargs)) if each.dim())
    return next(sizes, 0)
