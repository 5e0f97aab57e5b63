"""A checkpoint resumed gives the same bits as a run that never stopped; for every stateful hook."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.errors import ConfigurationError
from paceline.testing import run_ranks
from tests.hooks.cases import CASES, Bucket

WRAPPERS = {"paceline": DDP, "torch": TorchDDP}
HOOKS: dict[str, dict[str, Any]] = {
    "int8": {},
    "int8 stochastic": {"stochastic": True},
    "e4m3": {},
    "sign": {},
    "powersgd": {"start_powerSGD_iter": 2},
    "powersgd later": {"start_powerSGD_iter": 6},
    "powersgd cold": {
        "start_powerSGD_iter": 1,
        "warm_start": False,
        "compresses_first_steps": True,
    },
    "batched_powersgd": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2},
    "topk": {"ratio": 0.1},
    "topk with momentum": {"ratio": 0.05, "momentum": 0.9, "warmup_steps": 6},
    "topk, masked": {"ratio": 0.05, "momentum": 0.9, "momentum_masking": True},
}
STEPS, STOP = 9, 5


class Crossed(nn.Module):
    """Gradients arrive in another order than parameters are declared: buckets are cut anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for index in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[index](x))
        return x


def batch(step: int) -> Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))


def make(wrap: Any, name: str) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = wrap(Crossed(), bucket_cap_mb=0.003)
    state = hooks.register(model, name.split()[0].strip(","), **HOOKS[name])
    return model, state, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(model: nn.Module) -> bytes:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()


OTHERS = [("torch", 3), ("paceline", 2), ("torch", 2)]


@pytest.mark.parametrize(
    ("wrapper", "world"),
    [
        ("paceline", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_same_bits(wrapper: str, world: int) -> None:
    def on_rank() -> list[str]:
        different = []
        for name in HOOKS:
            model, state, optimizer = make(WRAPPERS[wrapper], name)
            train(model, optimizer, range(STOP))
            saved = through_a_file([model.state_dict(), state.state_dict(), optimizer.state_dict()])
            train(model, optimizer, range(STOP, STEPS))
            again, new_state, new_optimizer = make(WRAPPERS[wrapper], name)
            for target, value in zip((again, new_state, new_optimizer), saved, strict=True):
                target.load_state_dict(value)
            train(again, new_optimizer, range(STOP, STEPS))
            if bits(again) != bits(model):
                different.append(name)
        return different

    assert run_ranks(world, on_rank, timeout_s=250) == [[]] * world


def test_it_matters() -> None:
    """The test above can fail: without the hook's state, the bits are others."""

    def on_rank() -> None:
        for name in ("int8", "topk", "powersgd"):
            model, _, optimizer = make(DDP, name)
            train(model, optimizer, range(STOP))
            saved = through_a_file([model.state_dict(), optimizer.state_dict()])
            train(model, optimizer, range(STOP, STEPS))
            again, _, new_optimizer = make(DDP, name)
            again.load_state_dict(saved[0])
            new_optimizer.load_state_dict(saved[1])
            train(again, new_optimizer, range(STOP, STEPS))
            assert bits(again) != bits(model), name

    run_ranks(2, on_rank)


def test_buckets_are_cut_anew_in_this_model() -> None:
    """So the tests above are about more than one layout."""

    def on_rank() -> None:
        model, state, optimizer = make(DDP, "int8")
        train(model, optimizer, range(1))
        first = state.state_dict()["layouts"]
        train(model, optimizer, range(1, 3))
        second = state.state_dict()["layouts"]
        assert first != second
        assert len(second) > 2
        assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))

    run_ranks(2, on_rank)


def test_what_is_left_out_moves_with_its_parameter() -> None:
    """When buckets change, the running sum still follows the true one."""

    def on_rank() -> None:
        a, b = torch.zeros(300), torch.zeros(200)
        cuts = [[[a], [b]], [[b, a]], [[a, b]], [[b], [a]]]
        for wire in ("int8", "sign"):
            state = hooks.QuantizedState(wire=wire, block=64)
            sums = {id(p): torch.zeros(2, p.numel(), dtype=torch.float64) for p in (a, b)}
            for step in range(40):
                buckets = cuts[step // 10]
                for index, parameters in enumerate(buckets):
                    size = sum(p.numel() for p in parameters)
                    values = torch.stack(
                        [
                            0.2 + torch.randn(size, generator=_generator(step, index, rank))
                            for rank in range(dist.get_world_size())
                        ]
                    )
                    buffer = values[dist.get_rank()].clone()
                    bucket = Bucket(
                        buffer, parameters, index=index, is_last=index == len(buckets) - 1
                    )
                    hooks.quantized_hook(state, bucket).wait()
                    offset = 0
                    for p in parameters:
                        part = slice(offset, offset + p.numel())
                        sums[id(p)][0] += buffer[part]
                        sums[id(p)][1] += values.mean(dim=0)[part]
                        offset += p.numel()
            for found, expected in sums.values():
                limit = {"int8": 0.005, "sign": 0.6}[wire]
                assert (found - expected).norm() / expected.norm() < limit, wire

    run_ranks(3, on_rank)


@pytest.mark.parametrize("name", ["powersgd, rank 4", "batched powersgd", "int8", "topk 10 %"])
def test_later_buckets_change_while_the_first_is_on_its_way(name: str) -> None:
    """What is left out of a bucket in flight is not counted twice when the others are cut anew.

    With feedback, what came out and what is remembered are together what went in, to the bit of
    rounding, after every step.
    """

    def on_rank() -> None:
        state, hook = CASES[name].make()
        a, b, c = torch.zeros(24, 20), torch.zeros(30, 20), torch.zeros(20, 20)
        world, rank = dist.get_world_size(), dist.get_rank()
        went_in, came_out = torch.zeros(1480), torch.zeros(1480)
        for step in range(6):
            buckets = [[a], [b], [c]] if step < 3 else [[a], [b, c]]
            values = torch.randn(world, 1480, generator=_generator(step, 1))
            parts = values[rank].clone().split([sum(map(torch.numel, ps)) for ps in buckets])
            futures = [
                hook(state, Bucket(part, ps, index=i, is_last=i == len(buckets) - 1))
                for i, (part, ps) in enumerate(zip(parts, buckets, strict=True))
            ]
            came_out += torch.cat([future.wait() for future in futures])
            went_in += values.mean(dim=0)
            torch.testing.assert_close(came_out + left_over(state), went_in, rtol=0, atol=1e-3)

    run_ranks(2, on_rank)


def left_over(state: Any) -> Tensor:
    """The mean over the ranks of what a state remembers, parameter by parameter."""
    saved = state.state_dict()
    [name] = saved["memory"]
    total = torch.cat([saved["memory"][name][number] for number in sorted(saved["memory"][name])])
    dist.all_reduce(total.div_(dist.get_world_size()))
    offset = 0
    for index, numbers in enumerate(saved["layouts"]):
        numel = sum(len(saved["memory"][name][number]) for number in numbers)
        kept = saved["extra"].get("mean_errors", {}).get(index)
        if kept is not None:
            slices = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
            dist.all_gather(slices, kept)
            total[offset : offset + numel] += torch.cat(slices)[:numel]
        offset += numel
    return total


def _generator(*numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = seed * 100 + number
    return torch.Generator().manual_seed(seed)


def test_other_bucket_size_after_resuming() -> None:
    """Not the same bits, but nothing is lost and nothing fails."""

    def on_rank() -> None:
        model, state, optimizer = make(DDP, "int8")
        train(model, optimizer, range(STOP))
        saved = through_a_file([model.state_dict(), state.state_dict()])
        again = DDP(Crossed(), bucket_cap_mb=0.02)
        new_state = hooks.register(again, "int8")
        again.load_state_dict(saved[0])
        new_state.load_state_dict(saved[1])
        before = new_state.state_dict()["memory"]["error"]
        train(again, torch.optim.SGD(again.parameters(), lr=0.1), range(STOP, STEPS))
        after = new_state.state_dict()["memory"]["error"]
        assert before.keys() == after.keys()
        assert new_state.step == STEPS

    run_ranks(2, on_rank)


def test_state_of_a_subgroup_can_be_copied() -> None:
    """A copy has no group until it is given one, so it cannot know which rank it is."""

    def on_rank() -> None:
        pairs, _ = dist.new_subgroups(group_size=2)
        state = hooks.QuantizedState(pairs)
        parameters = [torch.zeros(100)]
        hooks.quantized_hook(state, Bucket(torch.randn(100), parameters)).wait()
        twin = copy.deepcopy(state)
        twin.process_group = pairs
        assert twin.step == 1
        error, other = (s.state_dict()["memory"]["error"][0] for s in (state, twin))
        assert error.any()
        assert torch.equal(error, other)
        hooks.quantized_hook(twin, Bucket(torch.randn(100), parameters)).wait()

    run_ranks(4, on_rank)


class TestWrongState:
    def test_of_another_hook(self) -> None:
        saved = hooks.TopKState().state_dict()
        with pytest.raises(ConfigurationError, match="hook is 'topk_hook' in what was saved"):
            hooks.QuantizedState().load_state_dict(saved)

    def test_of_another_rank(self) -> None:
        def on_rank() -> None:
            saved: list[Any] = [None, None]
            dist.all_gather_object(saved, hooks.QuantizedState().state_dict())
            other = saved[1 - dist.get_rank()]
            with pytest.raises(ConfigurationError, match="rank is"):
                hooks.QuantizedState().load_state_dict(other)

        run_ranks(2, on_rank)

    def test_of_another_model(self) -> None:
        def on_rank() -> str:
            state = hooks.TopKState()
            hooks.topk_hook(state, Bucket(torch.ones(30), [torch.zeros(30)])).wait()
            other = hooks.TopKState()
            other.load_state_dict(state.state_dict())
            with pytest.raises(RuntimeError, match="holds 30 values for parameter number 0"):
                hooks.topk_hook(other, Bucket(torch.ones(20), [torch.zeros(20)])).wait()
            return "refused"

        assert run_ranks(1, on_rank) == ["refused"]
