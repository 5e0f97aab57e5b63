"""``choose``: what it recommends follows from what it measured."""

from __future__ import annotations

import statistics
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.errors import ConfigurationError
from paceline.hooks import cost
from paceline.hooks.choose import parse_link
from paceline.testing import run_ranks


@pytest.fixture
def _two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each hook, which is enough where no time is judged."""
    monkeypatch.setattr(cost, "_ROUNDS", 2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700))


def test_slow_links_want_few_bytes() -> None:
    assert hooks.choose(net(), "1mbit").name == "int8"
    assert hooks.choose(net(), "1mbit", lossy=True).name == "powersgd"


@pytest.mark.alone
def test_fast_links_want_little_work() -> None:
    found = [hooks.choose(net(), 1e15).name for _ in range(9)]  # one may be disturbed
    assert statistics.mode(found) == "allreduce", found


def test_less_than_a_millisecond_is_not_worth_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine measures that much wrongly."""
    seconds = {"allreduce": 0.0009, "bf16": 0.0008, "fp16": 0.0007, "int8": 0.0}
    module = sys.modules["paceline.hooks.choose"]
    monkeypatch.setattr(module, "measure", lambda _, name, *__: (0, seconds[name]))
    assert hooks.choose(net(), 1e15).name == "allreduce"
    seconds["allreduce"] = 0.002
    assert hooks.choose(net(), 1e15).name == "bf16"


@pytest.mark.usefixtures("_two_rounds")
@pytest.mark.slow
def test_bytes_are_those_of_the_wire() -> None:
    """The same ratios as on a link (test_bytes.py), at any number of ranks."""
    for world in (2, 4, 8):
        choice = hooks.choose(net(), "1gbit", world=world, lossy=True)
        sent = {each.name: each.sent_bytes for each in choice.costs}
        numel = 2 * 700 * 701
        assert sent["allreduce"] == pytest.approx(4 * numel * 2 * (world - 1) / world, rel=0.001)
        assert sent["bf16"] / sent["allreduce"] == pytest.approx(0.5, rel=0.001)
        assert sent["int8"] / sent["allreduce"] < 0.27


@pytest.mark.usefixtures("_two_rounds")
def test_bytes_are_those_of_the_parameters_dtype() -> None:
    half = net().bfloat16()
    half.append(nn.Linear(700, 700))
    sent = {each.name: each.sent_bytes for each in hooks.choose(half, "1gbit").costs}
    numel = 700 * 701
    assert sent["allreduce"] == pytest.approx((2 + 2 + 4) * numel, rel=0.001)
    assert sent["bf16"] == pytest.approx((2 + 2 + 2) * numel, rel=0.001)


@pytest.mark.usefixtures("_two_rounds")
def test_the_choice_is_the_fastest_of_its_table() -> None:
    choice = hooks.choose(net(), "100mbit", lossy=True)
    seconds = {each.name: each.seconds(1e8) for each in choice.costs}
    assert seconds[choice.name] == min(seconds.values())
    assert f"-> {choice.name}" in str(choice)
    assert all(each.compute_s > 0 for each in choice.costs)


def test_it_can_be_put_to_use() -> None:
    def on_rank() -> str:
        torch.manual_seed(0)
        model = DDP(net())
        choice = hooks.choose(model, "1mbit")
        state = choice.register(model)
        assert isinstance(state, hooks.QuantizedState)
        model(torch.randn(2, 700)).sum().backward()
        assert dist.get_world_size() == 3
        return choice.name

    assert run_ranks(3, on_rank) == ["int8"] * 3


@pytest.mark.usefixtures("_two_rounds")
@pytest.mark.slow
def test_large_models_are_measured_by_a_sample() -> None:
    """Twice the parameters cost twice as much, without twice the measuring."""
    with torch.device("meta"):
        large = nn.Sequential(*[nn.Linear(5000, 5000) for _ in range(12)])
    first = hooks.choose(large, "1gbit").costs[0]
    assert first.sent_bytes == pytest.approx(4 * 12 * 5000 * 5001, rel=0.02)


@pytest.mark.parametrize(
    ("text", "bits"), [("100mbit", 1e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9), (5e7, 5e7)]
)
def test_links(text: str | float, bits: float) -> None:
    assert parse_link(text) == bits


@pytest.mark.parametrize("link", ["fast", "1gb", "", 0, -1.0, float("nan")])
def test_bad_links(link: str | float) -> None:
    with pytest.raises(ConfigurationError, match="100mbit"):
        hooks.choose(net(), link)


@pytest.mark.parametrize("world", [0, -1])
def test_bad_world(world: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1 rank"):
        hooks.choose(net(), world=world)


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigurationError, match="no parameter that requires a gradient"):
        hooks.choose(nn.ReLU())
