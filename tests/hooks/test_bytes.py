"""Bytes on the wire, counted on the links of test hosts, not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import hooks
from paceline.hooks.interface import HookBucket
from paceline.testing.hosts import hosts_unavailable_reason, run_on_hosts, test_hosts
from paceline.testing.namespaces import sent_bytes
from tests.hooks.cases import Bucket

REASON = hosts_unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SHAPE = (1024, 1024)
PLAIN = "plain all-reduce"
TURNS = 3


def power_sgd(hook: Any, rank: int = 1) -> Any:
    return lambda: (
        hooks.PowerSGDState(None, rank, start_powerSGD_iter=0, compresses_first_steps=True),
        hook,
    )


MAKE: dict[str, Any] = {
    PLAIN: lambda: (None, hooks.allreduce_hook),
    "fp16": lambda: (None, hooks.fp16_compress_hook),
    "bf16": lambda: (None, hooks.bf16_compress_hook),
    "int8": lambda: (hooks.QuantizedState(), hooks.quantized_hook),
    "e4m3": lambda: (hooks.QuantizedState(wire="e4m3"), hooks.quantized_hook),
    "e5m2": lambda: (hooks.QuantizedState(wire="e5m2"), hooks.quantized_hook),
    "sign": lambda: (hooks.QuantizedState(wire="sign"), hooks.quantized_hook),
    "topk 1 %": lambda: (hooks.TopKState(ratio=0.01), hooks.topk_hook),
    "powersgd": power_sgd(hooks.powerSGD_hook),
    "powersgd, rank 9": power_sgd(hooks.powerSGD_hook, 9),
    "batched powersgd": power_sgd(hooks.batched_powerSGD_hook),
    "batched powersgd, rank 9": power_sgd(hooks.batched_powerSGD_hook, 9),
    "int8 in fp16": lambda: (
        hooks.QuantizedState(),
        hooks.fp16_compress_wrapper(hooks.quantized_hook),
    ),
    "topk in fp16": lambda: (
        hooks.TopKState(ratio=0.01),
        hooks.fp16_compress_wrapper(hooks.topk_hook),
    ),
}


def bytes_per_bucket(names: list[str]) -> dict[str, float]:
    """What this host sends for one bucket, once connections are there.

    The least of several turns: on a busy machine TCP sends something twice now and then.
    """
    found = {}
    for name in names:
        state, hook = MAKE[name]()
        parameters = [torch.zeros(SHAPE)]
        _reduce(state, hook, parameters)
        dist.barrier()
        turns = []
        for _ in range(TURNS):
            before = sent_bytes("link0")
            _reduce(state, hook, parameters)
            dist.barrier()
            turns.append(sent_bytes("link0") - before)
        found[name] = float(min(turns))
    return found


def _reduce(state: Any, hook: Any, parameters: list[torch.Tensor]) -> None:
    bucket: HookBucket = Bucket(torch.randn(parameters[0].numel()), parameters)
    hook(state, bucket).wait()


def measured(hosts_count: int, names: list[str]) -> dict[str, float]:
    with test_hosts(hosts_count) as hosts:
        per_host = run_on_hosts(hosts, 1, bytes_per_bucket, names, timeout_s=60)
    return {name: sum(found[name] for found in per_host) / hosts_count for name in names}


@pytest.fixture(scope="module")
def on_two_hosts() -> dict[str, float]:
    return measured(2, list(MAKE))


@pytest.mark.parametrize(
    ("name", "at_least", "at_most"),
    [
        ("fp16", 0.48, 0.51),
        ("bf16", 0.48, 0.51),
        ("int8", 0.24, 0.27),
        ("e4m3", 0.24, 0.27),
        ("e5m2", 0.24, 0.27),
        ("sign", 0.03, 0.04),
        ("topk 1 %", 0.015, 0.03),
        ("int8 in fp16", 0.24, 0.27),
        ("topk in fp16", 0.012, 0.02),
    ],
)
def test_two_hosts(
    name: str, at_least: float, at_most: float, on_two_hosts: dict[str, float]
) -> None:
    ratio = on_two_hosts[name] / on_two_hosts[PLAIN]
    assert at_least < ratio < at_most, f"{ratio:.4f} x"


def test_plain_is_what_it_should_be(on_two_hosts: dict[str, float]) -> None:
    """Each of two ranks sends half of the values twice."""
    assert 1.0 < on_two_hosts[PLAIN] / (4 * SHAPE[0] * SHAPE[1]) < 1.03


@pytest.mark.parametrize("name", ["powersgd", "batched powersgd"])
def test_power_sgd_sends_rows_and_columns(name: str, on_two_hosts: dict[str, float]) -> None:
    """r (n + m) values for a matrix of n x m at rank r, as its formula says.

    Packet headers of such small messages are as large as they are, at any rank: so it is what 8
    further ranks add that is compared.
    """
    formula = 4 * (SHAPE[0] + SHAPE[1])
    first, ninth = on_two_hosts[name], on_two_hosts[f"{name}, rank 9"]
    assert 0.97 < (ninth - first) / 8 / formula < 1.08
    assert formula < first < 1.6 * formula
    assert first / on_two_hosts[PLAIN] < 0.004


def test_int8_does_not_depend_on_the_number_of_ranks(on_two_hosts: dict[str, float]) -> None:
    ratios = {2: on_two_hosts["int8"] / on_two_hosts[PLAIN]}
    for count in (3, 4, 8):
        found = measured(count, [PLAIN, "int8"])
        ratios[count] = found["int8"] / found[PLAIN]
    assert max(ratios.values()) < 0.27, ratios
    assert max(ratios.values()) < 1.03 * min(ratios.values()), ratios
