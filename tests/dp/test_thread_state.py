"""What a thread has in torch is what the caller has: modes, autocast, context, intra-op threads."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest
import torch

import paceline
from paceline.dp.intraop_threads import shares_of
from tests.dp.compare import CPUS

CPU = torch.device("cpu")
META = torch.device("meta")
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


def state() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "variable": VARIABLE.get(),
        "anomaly": torch.is_anomaly_enabled(),
    }


def states_of_replicas() -> list[dict[str, Any]]:
    return paceline.parallel_apply([state, state], [(), ()], devices=CPUS)


CONTEXTS: list[Any] = [
    torch.enable_grad,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    lambda: torch.autocast("cpu", enabled=False),
]


@pytest.mark.parametrize("context", CONTEXTS)
def test_modes_are_carried_and_gone_afterwards(context: Any) -> None:
    before = state()
    with context():
        assert states_of_replicas() == [state()] * 2
    assert states_of_replicas() == [before] * 2


def test_modes_nest() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        assert states_of_replicas() == [state()] * 2


@pytest.mark.may_leave("environ")  # use_deterministic_algorithms imports the compiler
def test_default_dtype_deterministic_flags_and_context_variables() -> None:
    token = VARIABLE.set("mine")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = states_of_replicas()
        assert found == [state()] * 2
        assert found[0]["default dtype"] is torch.float64
        assert found[0]["warn only"]
        assert found[0]["variable"] == "mine"
        made = paceline.parallel_apply([torch.zeros] * 2, [(1,), (1,)], devices=CPUS)
        assert made[0].dtype is torch.float64
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        VARIABLE.reset(token)
    assert states_of_replicas() == [state()] * 2


def test_what_a_replica_leaves_behind_does_not_reach_the_next_forward() -> None:
    def spoil() -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        VARIABLE.set("spoilt")

    paceline.parallel_apply([spoil, spoil], [(), ()], devices=CPUS)
    assert states_of_replicas() == [state()] * 2


@pytest.mark.parametrize(
    ("total", "devices", "shares"),
    [
        (2, [CPU, CPU], (1, 1)),
        (5, [CPU, CPU], (3, 2)),
        (8, [CPU, CPU, CPU], (3, 3, 2)),
        (1, [CPU, CPU], (1, 1)),
        (4, [CPU, META, CPU], (2, 4, 2)),
        (4, [META, META], (4, 4)),
    ],
)
def test_shares(total: int, devices: list[torch.device], shares: tuple[int, ...]) -> None:
    assert shares_of(total, devices) == shares


def test_intraop_threads_are_divided_and_nobody_else_loses_any() -> None:
    def of_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    def of_replicas(count: int) -> list[int]:
        calls = [torch.get_num_threads] * count
        return paceline.parallel_apply(calls, [()] * count, devices=["cpu"] * count)

    before = torch.get_num_threads()
    try:
        for total in (4, 2, 5):
            torch.set_num_threads(total)
            assert of_replicas(2) == list(shares_of(total, [CPU, CPU]))
            assert of_replicas(3) == list(shares_of(total, [CPU] * 3))
            assert of_replicas(1) == [total]  # on the caller's own thread
            assert torch.get_num_threads() == total
            assert of_new_thread() == total
    finally:
        torch.set_num_threads(before)
