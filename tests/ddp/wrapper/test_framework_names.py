"""Every name of torch's DDP, its reducer and its logging that a framework calls is there and works.

Read from the sources of Lightning 2.6.6, Accelerate 1.15.0, Transformers 5.23.0, Ray 2.60.0,
torchtitan 0.3.0 (which uses FSDP2 alone) and ``torch.distributed`` itself. Each name is used here
as they use it; what comes of whole steps is compared with torch in ``test_frameworks.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import distributed as torch_ddp
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.ddp.compare import assert_identical, batch, gradients
from tests.ddp.models import mlp


@dataclass(frozen=True)
class Name:
    """A name, who calls it, and how; what it returns is compared with torch's."""

    callers: str
    use: Callable[[Any], Any]


def backward(ddp: Any) -> bool:
    ddp(batch()).square().mean().backward()
    return all(parameter.grad is not None for parameter in ddp.parameters())


def after_backward(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def use(ddp: Any) -> Any:
        backward(ddp)
        return read(ddp)

    return use


def accumulate(ddp: Any) -> bool:
    with ddp.no_sync():
        return backward(ddp)


def prepared(outputs: Callable[[torch.Tensor], list[torch.Tensor]]) -> Callable[[Any], Any]:
    def use(ddp: Any) -> Any:
        with ddp.no_sync():
            loss = ddp(batch()).square().mean()
        ddp.reducer.prepare_for_backward(outputs(loss))
        loss.backward()
        return [parameter.grad.clone() for parameter in ddp.parameters()]

    return use


def joined(ddp: Any) -> bool:
    with Join([ddp], enable=True, throw_on_early_termination=False):
        return backward(ddp)


def hooked(ddp: Any) -> Any:
    ddp.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
    backward(ddp)
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def compressed(ddp: Any) -> bool:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    ddp.register_comm_hook(state=state, hook=hook)
    return backward(ddp)


def switched(ddp: Any) -> bool:
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False
    done = backward(ddp)
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    return done and backward(ddp)


def checkpointed(ddp: Any) -> list[str]:
    state = get_model_state_dict(ddp)
    set_model_state_dict(ddp, state)
    return list(state)


def composed(ddp: Any) -> Any:
    """``replicate()`` runs the module itself, between these two."""
    inputs, kwargs = ddp._pre_forward(batch())
    TorchDDP._active_ddp_module = ddp
    output = ddp.module(*inputs, **kwargs)
    TorchDDP._active_ddp_module = None
    ddp._post_forward(output).square().mean().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


NAMES = {
    "module": Name("all", lambda ddp: type(ddp.module).__name__),
    "isinstance": Name("all", lambda ddp: (isinstance(ddp, TorchDDP), isinstance(ddp, FSDPModule))),
    "state_dict": Name("Ray, Accelerate", lambda ddp: list(ddp.state_dict())),
    "train, eval": Name("all", lambda ddp: (ddp.eval().training, ddp.train().training)),
    "no_sync": Name("Lightning, Fabric, Accelerate, Ray, pipelining", accumulate),
    "join": Name("Accelerate", joined),
    "Joinable": Name("Accelerate", lambda ddp: isinstance(ddp, Joinable)),
    "device_ids": Name("Lightning", lambda ddp: (ddp.device_ids, ddp.output_device)),
    "find_unused_parameters": Name("Lightning", lambda ddp: ddp.find_unused_parameters),
    "static_graph": Name("Lightning", lambda ddp: ddp.static_graph),
    "require_*_sync": Name("Lightning, Accelerate, replicate", switched),
    "register_comm_hook": Name("Lightning, Accelerate", hooked),
    "register_comm_hook, PowerSGD": Name("Lightning, Accelerate", compressed),
    "reducer.prepare_for_backward([])": Name("Accelerate, Lightning", prepared(lambda loss: [])),
    "reducer.prepare_for_backward(outputs)": Name(
        "pipelining, Lightning",
        prepared(lambda loss: list(torch_ddp._find_tensors(loss))),  # type: ignore[attr-defined]
    ),
    "reducer._rebuild_buckets": Name("Lightning", lambda ddp: ddp.reducer._rebuild_buckets()),
    "_get_ddp_logging_data": Name(
        "Lightning",
        after_backward(lambda ddp: type(ddp._get_ddp_logging_data()) is dict),
    ),
    "_pre_forward, _post_forward": Name("replicate", composed),
    "_get_active_ddp_module": Name("dynamo", lambda ddp: TorchDDP._get_active_ddp_module()),
    "get_model_state_dict": Name("torchtitan, Accelerate", checkpointed),
    "parameters_to_ignore": Name("Lightning", lambda ddp: ddp.parameters_to_ignore),
    "zero_grad": Name("all", after_backward(lambda ddp: ddp.zero_grad())),
    "_set_static_graph": Name("checkpointing users", lambda ddp: ddp._set_static_graph()),
}


def use_both(name: str) -> tuple[Any, Any]:
    model = mlp(4)
    theirs, ours = TorchDDP(copy.deepcopy(model)), DDP(model)
    return NAMES[name].use(ours), NAMES[name].use(theirs)


def use_all() -> dict[str, tuple[Any, Any]]:
    return {name: use_both(name) for name in NAMES}


def is_gradients(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], torch.Tensor)


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Any, Any]]:
    found, _ = run_ranks(2, use_all)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_works_as_its_callers_use_it(name: str, results: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = results[name]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0) if is_gradients(ours) else None
    assert is_gradients(ours) or ours == theirs, NAMES[name].callers


def test_delay_all_reduce_after_a_static_step() -> None:
    """Lightning, after the first manual backward of a static graph: nothing is left to do."""

    def on_rank() -> None:
        plain, ddp = DDP(mlp(4)), DDP(mlp(4), static_graph=True)
        for model in (plain, ddp):
            backward(model)
        ddp.reducer._delay_all_reduce()
        assert_identical(gradients(ddp), gradients(plain))

    run_ranks(2, on_rank)


class Interface:
    """RLlib's RLModule: an interface beside the wrapper, whose constructor is not called."""

    def forward_train(self, x: torch.Tensor) -> Any:
        return self(x)  # type: ignore[operator]


def test_a_class_with_another_base_first() -> None:
    """RLlib's ``TorchDDPRLModule``."""

    class Both(Interface, DDP):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            DDP.__init__(self, *args, **kwargs)
            self.space = self.unwrapped()[0].in_features

        def unwrapped(self) -> nn.Module:
            return self.module

    def on_rank() -> None:
        both, plain = Both(mlp(4)), DDP(mlp(4))
        both.forward_train(batch()).square().mean().backward()
        backward(plain)
        assert both.space == 4
        assert_identical(gradients(both), gradients(plain))

    run_ranks(2, on_rank)


def test_everything_of_the_reducer_that_torch_calls_from_python() -> None:
    """What torch's own class calls has a counterpart here, or is a step of what ours never does."""
    never = {
        "_autograd_hook",  # optimizer in backward: ddp/features/optimizer_in_backward.py
        "_get_zeros_like_grad_buckets",  # join: ddp/features/join.py, mirror_step
        "_push_all_rebuilt_params",
        "_reset_state",  # _update_process_group: change_transport
        "_run_allreduce_hook",
        "_run_comm_hook",
        "_set_ddp_runtime_logging_sample_rate",  # ours has it on the wrapper
        "_set_forward_pass_work_handle",
        "_set_mixed_precision_param_dtype",  # mixed precision: ddp/features/precision.py
        "_set_optimizer_in_backward",
        "_set_static_graph",  # on the wrapper: the policy is its
        "_update_process_group",
        "get_backward_stats",  # ddp.stats()
        "set_logger",
        "_pybind11_conduit_v1_",
    }

    if hasattr(dist.Reducer, "_finalize_backward_manual"):  # type: ignore[attr-defined]
        # Since torch 2.15; ours: ddp/reduce/manual_finish.py
        never |= {
            "_finalize_backward_manual",
            "_set_manual_finalization_required",
            "_should_finalize_after_backward",
        }

    def names_without() -> set[str]:
        ddp = DDP(mlp(4))
        theirs = {name for name in dir(dist.Reducer) if not name.startswith("__")}  # type: ignore[attr-defined]
        return {name for name in theirs if not hasattr(ddp.reducer, name)}

    assert run_ranks(1, names_without) == [never]
