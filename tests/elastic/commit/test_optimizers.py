"""A step that has begun cannot be undone, even one that failed half way; what cannot be kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from paceline.elastic import State
from paceline.errors import ConfigurationError
from paceline.hooks import DiLoCoOptimizer
from paceline.testing import run_ranks


class HalfWay(torch.optim.SGD):
    """Changes a parameter, then loses its collective: as one that gathers inside of its step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise ConnectionError("a rank died")


def test_a_step_that_failed_half_way_is_not_clean() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = HalfWay(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer, step=0)
    with pytest.raises(ConnectionError):
        optimizer.step()
    state.put_back()
    assert not state.is_clean  # else the step would be applied on top of half of itself
    state.close()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_backward_that_fails_in_a_closure_is_clean(make: Any, *, by_name: bool) -> None:
    """It comes before the first change; a second one, in LBFGS, comes after it."""
    model = torch.nn.Linear(2, 1)
    optimizer = make(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer, step=0)
    calls, fails_at = [0], [1]

    def closure() -> torch.Tensor:
        calls[0] += 1
        if calls[0] == fails_at[0]:
            raise ConnectionError("a rank died")
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)

    with pytest.raises(ConnectionError):
        step()
    state.put_back()
    assert state.is_clean
    before = model.weight.clone()
    calls[0], fails_at[0] = 0, 2
    if make is torch.optim.LBFGS:
        with pytest.raises(ConnectionError):
            step()
    else:
        step()
    assert not torch.equal(model.weight, before)
    assert not state.is_clean
    state.close()


def test_a_step_with_a_meeting_is_undone_as_a_whole() -> None:
    def on_rank() -> None:
        model = torch.nn.Linear(2, 1)
        for inner in (torch.optim.SGD, HalfWay):
            optimizer = DiLoCoOptimizer(inner(model.parameters(), lr=0.1), period=1)
            optimizer._meet = _refuse  # type: ignore[method-assign]
            state = State(model=model, optimizer=optimizer, step=0)
            before = model.weight.clone()
            model(torch.ones(3, 2)).sum().backward()
            with pytest.raises(ConnectionError):
                optimizer.step()
            assert not state.is_clean
            state.put_back()
            assert state.is_clean
            assert torch.equal(model.weight, before)
            state.close()

    run_ranks(1, on_rank)


def _refuse() -> None:
    raise ConnectionError("a rank died")


def test_an_optimizer_in_parts_is_refused() -> None:
    def on_rank() -> list[str]:
        model = torch.nn.Linear(4, 4)
        parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        texts = []
        for optimizer in (parts, DiLoCoOptimizer(parts, period=2)):
            with pytest.raises(ConfigurationError) as caught:
                State(model=model, opt=optimizer)
            texts.append(str(caught.value))
        return texts

    for texts in run_ranks(2, on_rank):
        assert texts[0].startswith("opt=ZeroRedundancyOptimizer cannot be kept: each rank has a")
        assert all("Take AdamW without it" in text for text in texts)


class Consolidated(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("call consolidate() first")


class Remembering(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = {1, 2}


def test_what_could_not_be_sent_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=r"opt=Consolidated .*: call consolidate"):
        State(model=model, opt=Consolidated(model.parameters(), lr=0.1))
    group = {"params": model.parameters(), "seen": {1, 2}}
    with pytest.raises(ConfigurationError, match="opt=SGD cannot be kept: a set cannot be sent"):
        State(model=model, opt=torch.optim.SGD([group], lr=0.1))
    optimizer = Remembering(model.parameters(), lr=0.1)
    state = State(model=model, opt=optimizer)
    state.commit()
    optimizer.step()
    with pytest.raises(ConfigurationError, match="what an optimizer remembers cannot be kept"):
        state.commit()
    state.close()
