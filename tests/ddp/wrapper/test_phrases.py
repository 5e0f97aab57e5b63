"""An error of ours has the phrase of torch's for the same mistake: both are raised, side by side.

People match on torch's texts, in tests and in the alerts on their logs. Ours say more, and are of
a subclass of what torch raises.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline.testing import run_ranks
from tests.raising import error_of, warnings_of

Wrap = Callable[..., Any]


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def mixed() -> nn.Module:
    return nn.Sequential(linear(), nn.Linear(2, 2, device="meta"))


def delayed(wrap: Wrap) -> Any:
    return wrap(linear(), delay_all_reduce_named_params=[])


def hooked_twice(wrap: Wrap) -> None:
    ddp = wrap(linear())
    for _ in range(2):
        ddp.register_comm_hook(None, lambda state, bucket: None)


def builtin_twice(wrap: Wrap) -> None:
    ddp = wrap(linear())
    for _ in range(2):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def annotated(wrap: Wrap) -> None:
    def hook(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    wrap(linear()).register_comm_hook(None, hook)


def returning(wrap: Wrap) -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": int}  # type: ignore[attr-defined]
    wrap(linear()).register_comm_hook(None, hook)


def static_too_late(wrap: Wrap) -> None:
    ddp = wrap(linear())
    ddp(torch.ones(1, 2)).sum().backward()
    ddp._set_static_graph()


def both_groups(wrap: Wrap) -> None:
    wrap(linear(), process_group=dist.group.WORLD, device_mesh=DeviceMesh("cpu", [0]))


def two_dimensions(wrap: Wrap) -> None:
    wrap(linear(), device_mesh=DeviceMesh("cpu", [[0]]))


def joined_over_two_groups(wrap: Wrap) -> None:
    other = wrap(linear(), process_group=dist.new_group([0]))
    with Join([wrap(linear()), other]):
        pass


def unfinished(wrap: Wrap) -> None:
    """torch finds it at the next forward, ours at the end of this backward."""
    ddp = wrap(nn.ModuleDict({"a": linear(), "b": linear()}))
    ddp.module.forward = lambda x: ddp.module["a"](x)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()


class Twice(nn.Module):
    """Runs one layer twice under reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


def ready_twice(wrap: Wrap) -> None:
    ddp = wrap(Twice(), find_unused_parameters=True)
    ddp(torch.ones(1, 2)).sum().backward()


def changed_graph(wrap: Wrap) -> None:
    ddp = wrap(nn.ModuleDict({"a": linear(), "b": linear()}), static_graph=True)
    for names in ("a", "ab", "ab"):
        ddp.module.forward = lambda x, names=names: sum(ddp.module[n](x) for n in names)
        ddp(torch.ones(1, 2)).sum().backward()


# name: (the mistake, torch's phrase)
MISTAKES: dict[str, tuple[Callable[[Wrap], Any], str]] = {
    "frozen": (
        lambda wrap: wrap(frozen()),
        (
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient"
        ),
    ),
    "lazy": (
        lambda wrap: wrap(nn.LazyLinear(2)),
        (
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        ),
    ),
    "devices of several types": (
        lambda wrap: wrap(mixed()),
        (
            "DistributedDataParallel's input module must be on the same type of devices, but input "
            "module parameters locate in "
        ),
    ),
    "several device_ids": (
        lambda wrap: wrap(linear(), device_ids=[0, 1]),
        "device_ids can only be None or contain a single element",
    ),
    "device_ids on CPU": (
        lambda wrap: wrap(linear(), device_ids=[0]),
        (
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], "
            "output_device None, and module parameters"
        ),
    ),
    "output_device": (
        lambda wrap: wrap(linear(), output_device=1),
        "but got device_ids None, output_device 1, and module parameters",
    ),
    "delayed without a trigger": (
        delayed,
        "and param_to_hook_all_reduce need to be set at the same time",
    ),
    "mesh and group": (
        both_groups,
        "Cannot specify both process_group and device_mesh arguments",
    ),
    "hook is no function": (
        lambda wrap: wrap(linear()).register_comm_hook(None, 3),
        "Communication hook must be callable.",
    ),
    "hook twice": (
        hooked_twice,
        "register_comm_hook or register_builtin_comm_hook can only be called once",
    ),
    "built-in hook twice": (builtin_twice, "comm_hook can only be called once"),
    "mesh of two dimensions": (two_dimensions, "Only 1D device mesh is supported, but got "),
    "two groups in a join": (
        joined_over_two_groups,
        "Using join context manager with multiple process groups",
    ),
    "bucket annotation": (annotated, "bucket annotation should be dist.GradBucket"),
    "return annotation": (
        returning,
        "return annotation should be torch.futures.Future[torch.Tensor]",
    ),
    "buffer hook": (
        lambda wrap: wrap(linear())._register_buffer_comm_hook(None, "x"),
        "hook must be callable, got str",
    ),
    "SyncBatchNorm on CPU": (
        lambda wrap: wrap(nn.Sequential(linear(), nn.SyncBatchNorm(2))),
        "SyncBatchNorm layers only work with GPU modules",
    ),
    "sample rate": (
        lambda wrap: wrap(linear())._set_ddp_runtime_logging_sample_rate(0),
        "DDP runtime logging sample rate should be equal or greater than 1",
    ),
    "pickle": (
        lambda wrap: pickle.dumps(wrap(linear(), process_group=dist.new_group([0]))),
        "DDP Pickling/Unpickling are only supported when using DDP with the default process group",
    ),
    "static graph too late": (
        static_too_late,
        (
            "set_static_graph() should be called before training loop starts and after "
            "DistributedDataParallel is constructed"
        ),
    ),
    "unfinished": (unfinished, "Expected to have finished reduction in the prior iteration"),
    "ready twice": (ready_twice, "Expected to mark a variable ready only once"),
    "graph changed": (changed_graph, "Your training graph has changed in this iteration"),
}


def static_twice(wrap: Wrap) -> None:
    wrap(linear(), static_graph=True)._set_static_graph()


def searching_then_static(wrap: Wrap) -> None:
    wrap(linear(), find_unused_parameters=True)._set_static_graph()


BOTH_KINDS = "You passed find_unused_parameters=true to DistributedDataParallel, "

# name: (what torch warns of, how its text begins)
WARNED: dict[str, tuple[Callable[[Wrap], Any], str]] = {
    "static graph twice": (
        static_twice,
        "You've set static_graph to be True, no need to set it again.",
    ),
    "unused and static": (
        lambda wrap: wrap(linear(), find_unused_parameters=True, static_graph=True),
        BOTH_KINDS,
    ),
    "unused, then static": (searching_then_static, BOTH_KINDS),
    "check_reduction": (
        lambda wrap: wrap(linear(), check_reduction=True),
        "The `check_reduction` argument in `DistributedDataParallel` module is deprecated",
    ),
    "buffers twice": (
        lambda wrap: wrap(linear(), broadcast_buffers=True, forward_sync_buffers=True),
        (
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
            "`broadcast_buffers` is deprecated and its value is ignored"
        ),
    ),
    "buffers": (
        lambda wrap: wrap(linear(), broadcast_buffers=True),
        "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead",
    ),
}


def raise_all() -> dict[str, tuple[Any, Any]]:
    return {
        name: (error_of(lambda run=run: run(DDP)), error_of(lambda run=run: run(TorchDDP)))
        for name, (run, _) in MISTAKES.items()
    }


@pytest.fixture(scope="module")
def raised() -> dict[str, tuple[Any, Any]]:
    return run_ranks(1, raise_all)[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_has_the_phrase_of_torch(name: str, raised: dict[str, tuple[Any, Any]]) -> None:
    (ours, our_text), (theirs, their_text) = raised[name]
    phrase = MISTAKES[name][1]
    assert phrase in their_text, f"torch says: {their_text}"
    assert phrase in our_text, f"ours says: {our_text}"
    assert theirs[0] in ours, f"torch raises {theirs[0]}, ours {ours}"


def warn_all() -> dict[str, list[list[tuple[str, str]]]]:
    return {
        name: [warnings_of(lambda run=run, wrap=wrap: run(wrap)) for wrap in (DDP, TorchDDP)]
        for name, (run, _) in WARNED.items()
    }


def test_warnings_begin_as_torchs() -> None:
    """Filters match the category and the beginning of the text."""
    for name, found in run_ranks(1, warn_all)[0].items():
        for told in found:
            assert [text.startswith(WARNED[name][1]) for _, text in told] == [True], (name, told)
        ((ours, _),), ((torchs, _),) = found
        assert ours == torchs, name


def test_different_models() -> None:
    def on_rank() -> tuple[str, str]:
        layers = 1 + dist.get_rank()
        model = nn.Sequential(*(linear() for _ in range(layers)))
        return error_of(lambda: DDP(model))[1], error_of(lambda: TorchDDP(model))[1]

    for ours, theirs in run_ranks(2, on_rank):
        for text in (ours, theirs):
            assert "DDP expects same model across all ranks, but Rank " in text
            assert "has inconsistent" in text


def test_different_sizes() -> None:
    """torch says it on the other ranks only, and rank 0 hangs: ours alone."""

    def on_rank() -> str:
        return error_of(lambda: DDP(nn.Linear(2, 2 + dist.get_rank())))[1]

    for text in run_ranks(2, on_rank):
        assert "params[0]" in text
        assert "appears not to match sizes of the same param in process 0" in text


def test_inputs_exhausted() -> None:
    def on_rank() -> list[str]:
        return [error_of(lambda wrap=wrap: run_out(wrap))[1] for wrap in (DDP, TorchDDP)]

    def run_out(wrap: Wrap) -> None:
        ddp = wrap(linear())
        with ddp.join(throw_on_early_termination=True):
            for _ in range(1 + dist.get_rank()):
                ddp(torch.ones(1, 2)).sum().backward()

    first, second = run_ranks(2, on_rank)
    assert first == ["Rank 0 exhausted all inputs."] * 2
    for text in second:
        assert "Detected at least one rank that exhausted inputs. Throwing across all rank" in text


def test_no_group() -> None:
    def on_rank() -> list[tuple[list[str], str]]:
        return [error_of(lambda wrap=wrap: wrap(linear())) for wrap in (DDP, TorchDDP)]

    phrase = "Default process group has not been initialized, please make sure to call"
    for kinds, text in run_ranks(1, on_rank, init=False)[0]:
        assert "ValueError" in kinds
        assert phrase in text
