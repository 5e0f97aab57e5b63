"""Errors and warnings of dp, hooks, nn and shards have torch's phrase: both are raised.

Those of the wrapper, of the backend and of ps are in ``test_phrases.py`` of ``tests/ddp/wrapper/``,
``tests/shm/backend/`` and ``tests/ps/client/``. torch's functions for several
devices refuse a machine without accelerators, so what they do there is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import (
    hierarchical_model_averager as torch_hierarchical,
)
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGD
from torch.nn import parallel as torch_parallel

import paceline
from paceline import hooks
from paceline.testing import run_ranks
from tests.raising import Raised, error_of, warnings_of

X = torch.ones(1, 2)


class Pair(NamedTuple):
    """One mistake, made with ours and with torch's."""

    phrase: str
    ours: Callable[[], Any]
    torchs: Callable[[], Any]


class Fails(nn.Module):
    def __init__(self, key: object) -> None:
        super().__init__()
        self.key = key

    def forward(self, x: torch.Tensor) -> Any:
        return {}[self.key]  # type: ignore[var-annotated]


def both(phrase: str, action: Callable[[Any], Any], ours: Any, torchs: Any) -> Pair:
    return Pair(phrase, lambda: action(ours), lambda: action(torchs))


def failing_replicas(key: object) -> Any:
    return paceline.parallel_apply([Fails(key), Fails(key)], [X, X])


def torchs_failing_replica(key: object) -> None:
    """What torch's parallel_apply does with an exception of a replica."""
    try:
        Fails(key)(X)
    except KeyError:
        ExceptionWrapper(where="in replica 0 on device cpu").reraise()


def torch_misplaced() -> Any:
    """A wrapper as it is on a machine with accelerators, around a module that is elsewhere."""
    wrapped = nn.DataParallel(nn.Linear(2, 2, device="meta"))
    wrapped.device_ids, wrapped.src_device_obj = [0], torch.device("cpu")
    return wrapped(X)


def scattered(x: torch.Tensor, dim: int) -> Any:
    return paceline.scatter(x, ["cpu", "cpu"], dim)


DP = {
    "inputs": both(
        "The number of modules 2 is not equal to the number of inputs 1",
        lambda parallel: parallel.parallel_apply([nn.Identity(), nn.Identity()], [X]),
        paceline,
        torch_parallel,
    ),
    "kwargs": both(
        "The number of modules 1 is not equal to the number of kwargs_tup 2",
        lambda parallel: parallel.parallel_apply([nn.Identity()], [X], [{}, {}]),
        paceline,
        torch_parallel,
    ),
    "devices": both(
        "The number of modules 1 is not equal to the number of devices 2",
        lambda parallel: parallel.parallel_apply([nn.Identity()], [X], None, [0, 1]),
        paceline,
        torch_parallel,
    ),
    "a replica fails": Pair(
        "Caught KeyError in replica 0 on device cpu.",
        lambda: failing_replicas("wonderful"),
        lambda: torchs_failing_replica("wonderful"),
    ),
    "a replica fails, a key that is no text": Pair(
        "Caught KeyError in replica 0 on device cpu.",
        lambda: failing_replicas((3, "x")),
        lambda: torchs_failing_replica((3, "x")),
    ),
    "module elsewhere": Pair(
        "module must have its parameters and buffers on device cpu (device_ids[0]) but found one "
        "of them on device: meta",
        lambda: paceline.DataParallel(nn.Linear(2, 2, device="meta"), ["cpu", "cpu"])(X),
        torch_misplaced,
    ),
    "no devices": both(
        "device type could not be determined",
        lambda parallel: parallel.data_parallel(nn.Identity(), X),
        paceline,
        torch_parallel,
    ),
    "dicts": both(
        "All dicts must have the same number of keys",
        lambda parallel: parallel.gather([{"a": X}, {"a": X, "b": X}], "cpu"),
        paceline,
        torch_parallel,
    ),
    "dimension": Pair(
        "Dimension out of range (expected to be in range of [-2, 1], but got 2)",
        lambda: scattered(X, 2),
        lambda: X.chunk(2, 2),
    ),
}

NN = {
    "one dimension": both(
        "expected at least 2D input (got 1D input)",
        lambda nn: nn.SyncBatchNorm(2)(torch.ones(2)),
        paceline.nn,
        nn,
    ),
    "no channels": both(
        "SyncBatchNorm number of input channels should be non-zero",
        lambda nn: nn.SyncBatchNorm(2)(torch.ones(2, 0)),
        paceline.nn,
        nn,
    ),
    "other channels": both(
        "running_mean should contain 3 elements not 2",
        lambda nn: nn.SyncBatchNorm(2)(torch.ones(2, 3)),
        paceline.nn,
        nn,
    ),
    "one value": both(
        "Expected more than 1 value per channel when training",
        lambda nn: nn.SyncBatchNorm(2)(torch.ones(1, 2)),
        paceline.nn,
        nn,
    ),
}


def not_finite() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    return parameter


SHARDS = {
    "norm": both(
        "is non-finite, so it cannot be clipped",
        lambda utils: utils.clip_grad_norm_(not_finite(), 1.0, error_if_nonfinite=True),
        paceline,
        nn.utils,
    ),
}


@pytest.mark.parametrize("name", [*DP, *NN, *SHARDS])
def test_has_the_phrase_of_torch(name: str) -> None:
    check(*errors_of({**DP, **NN, **SHARDS}[name]))


def errors_of(pair: Pair) -> tuple[str, Raised, Raised]:
    return pair.phrase, error_of(pair.ours), error_of(pair.torchs)


def check(phrase: str, ours: Raised, torchs: Raised) -> None:
    assert phrase in torchs[1], f"torch says: {torchs[1]}"
    assert phrase in ours[1], f"ours says: {ours[1]}"
    assert torchs[0][0] in ours[0], f"torch raises {torchs[0][0]}, ours {ours[0]}"


class Averagers(NamedTuple):
    periodic: Any
    hierarchical: Any


OURS = Averagers(hooks.PeriodicModelAverager, hooks.HierarchicalModelAverager)
TORCHS = Averagers(
    torch_averagers.PeriodicModelAverager, torch_hierarchical.HierarchicalModelAverager
)

# These need a process group.
AVERAGERS: dict[str, tuple[str, Callable[[Averagers], Any]]] = {
    "period": ("Arg ``period`` must be a positive value.", lambda a: a.periodic(period=0)),
    "warm-up": (
        "Arg ``warmup_steps`` must be a non-negative number.",
        lambda a: a.periodic(period=2, warmup_steps=-1),
    ),
    "hierarchy's warm-up": (
        "Arg ``warmup_steps`` must be a non-negative number.",
        lambda a: a.hierarchical({2: 1}, warmup_steps=-1),
    ),
    "empty": (
        "Arg ``period_group_size_dict`` must not be empty.",
        lambda a: a.hierarchical({}),
    ),
    "first period": (
        "The minimum period in arg ``period_group_size_dict`` must be a positive value.",
        lambda a: a.hierarchical({0: 1}),
    ),
    "last group": (
        (
            "The last value in arg ``period_group_size_dict`` 4 must be equal to the size of arg "
            "``process_group`` 1"
        ),
        lambda a: a.hierarchical({2: 4}),
    ),
    "no parameters": (
        "Parameter input of type <class 'int'> is not supported",
        lambda a: a.periodic(period=2).average_parameters([3]),
    ),
}


def raise_all() -> dict[str, tuple[str, Raised, Raised]]:
    return {
        name: errors_of(both(phrase, action, OURS, TORCHS))
        for name, (phrase, action) in AVERAGERS.items()
    }


@pytest.fixture(scope="module")
def raised() -> dict[str, tuple[str, Raised, Raised]]:
    return run_ranks(1, raise_all)[0]


@pytest.mark.parametrize("name", AVERAGERS)
def test_averagers(name: str, raised: dict[str, tuple[str, Raised, Raised]]) -> None:
    check(*raised[name])


def test_power_sgd_too_early() -> None:
    for options in ({}, {"use_error_feedback": False}, {"warm_start": False}):
        for state in (hooks.PowerSGDState, torch_power.PowerSGDState):
            for early in (0, 1):
                with pytest.raises(ValueError, match=TOO_EARLY):
                    state(None, start_powerSGD_iter=early, **options)
    for state in (hooks.PowerSGDState, torch_power.PowerSGDState):
        state(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    assert hooks.PowerSGDState(None, start_powerSGD_iter=0, compresses_first_steps=True).iter == 0


def texts_of(action: Callable[[], Any]) -> list[str]:
    return [text for _, text in warnings_of(action)]


def load_without_step(post_local_sgd: Any, averagers: Averagers) -> None:
    inner = torch.optim.SGD([nn.Parameter(X.clone())], lr=0.1)
    optimizer = post_local_sgd(inner, averagers.periodic(period=2))
    optimizer.load_state_dict(inner.state_dict())


EVERY_STEP = "is 1, no need to use model averaging"
OPTIMIZERS = {OURS: hooks.PostLocalSGDOptimizer, TORCHS: TorchPostLocalSGD}
AVERAGERS_WARN: list[tuple[str, Callable[[Averagers], Any]]] = [
    (f"When period {EVERY_STEP}", lambda a: a.periodic(period=1)),
    (
        f"When the maximum period in arg ``period_group_size_dict`` {EVERY_STEP}",
        lambda a: a.hierarchical({1: 1}),
    ),
    (
        (
            "Loaded state dict does not contain a step counter for an averager. Setting step "
            "counter to 0"
        ),
        lambda a: load_without_step(OPTIMIZERS[a], a),
    ),
]
SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; will instead "
    "unsqueeze and return a vector"
)
TOO_EARLY = "Expect `start_powerSGD_iter` > 1 if"


def warn_all() -> list[tuple[str, list[str], list[str]]]:
    return [
        (phrase, *(texts_of(lambda a=a, run=run: run(a)) for a in (OURS, TORCHS)))
        for phrase, run in AVERAGERS_WARN
    ]


def test_warnings_begin_as_torchs() -> None:
    """Filters match a warning's beginning."""
    for phrase, ours, torchs in run_ranks(1, warn_all)[0]:
        for texts in (ours, torchs):
            assert len(texts) == 1
            assert texts[0].startswith(phrase)


NO_DEVICES = "no available devices were found"


def test_no_devices() -> None:
    """torch asks for an accelerator first."""
    with pytest.raises(RuntimeError, match=NO_DEVICES):
        paceline.data_parallel(nn.Identity(), X, [])


def test_gathered_scalars() -> None:
    """torch's gather needs an accelerator to come so far."""
    (text,) = texts_of(lambda: paceline.gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu"))
    assert text.startswith(SCALARS)
