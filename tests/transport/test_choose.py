"""Which transport a wrapper gets, that all ranks get the same, and that it says why."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import ConfigurationError, SharedMemoryError
from paceline.native import extension
from paceline.testing import run_ranks


def step(ddp: nn.Module) -> torch.Tensor:
    ddp.zero_grad()
    ddp(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    return next(ddp.parameters()).grad.clone()


def chosen(**options: object) -> tuple[str, str]:
    ddp = DDP(nn.Linear(3, 2), **options)
    expected = 2 * torch.full((2, 3), (dist.get_world_size() + 1) / 2)
    assert torch.equal(step(ddp), expected)
    return ddp.stats().transport, ddp.stats().transport_reason


class TestChoice:
    @pytest.mark.parametrize("backend", ["gloo", "paceline"])
    @pytest.mark.parametrize("transport", ["auto", "shm"])
    def test_ranks_of_a_host_share_memory(self, transport: str, backend: str) -> None:
        found = (
            run_ranks(3, chosen, backend=backend)
            if transport == "auto"
            else run_ranks(3, lambda: chosen(transport="shm"), backend=backend)
        )
        assert found == [("shm", "3 ranks share the memory of one host")] * 3

    def test_the_group_if_asked(self) -> None:
        found = run_ranks(2, lambda: chosen(transport="c10d"))
        assert found == [("c10d:gloo", "transport='c10d' was asked for")] * 2

    def test_one_rank(self) -> None:
        assert run_ranks(1, chosen) == [("c10d:gloo", "there is one rank")]
        assert run_ranks(1, lambda: chosen(transport="shm")[0]) == ["shm"]

    def test_a_subgroup(self) -> None:
        def run() -> tuple[str, str] | None:
            group = dist.new_group([0, 2])
            if dist.get_rank() == 1:
                return None
            ddp = DDP(nn.Linear(3, 2), process_group=group)
            assert torch.equal(step(ddp), torch.full((2, 3), 4.0))
            return ddp.stats().transport, ddp.stats().transport_reason

        shared = ("shm", "2 ranks share the memory of one host")
        assert run_ranks(3, run) == [shared, None, shared]

    def test_unknown_word(self) -> None:
        def run() -> str:
            with pytest.raises(ConfigurationError) as error:
                DDP(nn.Linear(1, 1), transport="rdma")
            return str(error.value)

        (text,) = run_ranks(1, run)
        assert "transport='rdma'" in text
        assert "'auto', 'shm', 'c10d'" in text


class TestRefusal:
    def test_disabled_on_one_rank_is_disabled_on_all(self) -> None:
        def run() -> tuple[str, str]:
            if dist.get_rank() == 1:
                os.environ["PACELINE_DISABLE_SHM"] = "1"
            return chosen()  # without a warning: somebody wanted it so

        for name, reason in run_ranks(2, run):
            assert name == "c10d:gloo"
            assert "rank 1" in reason
            assert "PACELINE_DISABLE_SHM" in reason

    def test_shm_that_cannot_be_had_is_an_error_on_every_rank(self) -> None:
        def run() -> str:
            with pytest.raises(SharedMemoryError) as error:
                DDP(nn.Linear(3, 2), transport="shm")
            return str(error.value)

        for text in run_ranks(2, run, env={"PACELINE_DISABLE_SHM": "1"}):
            assert "PACELINE_DISABLE_SHM" in text
            assert "transport='auto'" in text

    def test_ranks_that_want_different_things(self) -> None:
        def run() -> str:
            with pytest.raises(ConfigurationError) as error:
                DDP(nn.Linear(3, 2), transport="shm" if dist.get_rank() else "c10d")
            return str(error.value)

        for text in run_ranks(2, run):
            assert "rank 0 transport='c10d'" in text
            assert "rank 1 transport='shm'" in text

    def test_without_the_native_core_rank_0_says_so_once(self) -> None:
        def run() -> tuple[str, list[str]]:
            extension.native = None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                found = [chosen() for _ in range(3)]
            assert found[0] == found[2]
            return found[0][1], [str(warning.message) for warning in caught]

        (reason, told), (_, silent) = run_ranks(2, run)
        assert "C compiler" in reason
        assert len(told) == 1
        assert reason in told[0]
        assert silent == []


class TestWhen:
    """To choose is a collective, and some things a single rank does alone."""

    def test_one_rank_may_copy_a_wrapper(self) -> None:
        def run() -> tuple[str, str]:
            ddp = DDP(nn.Linear(3, 2))
            if dist.get_rank() == 0:
                assert (
                    copy.deepcopy(ddp).stats().transport == "not chosen before the first backward"
                )
            both = copy.deepcopy(ddp)
            step(both)
            return ddp.stats().transport, both.stats().transport

        assert run_ranks(2, run) == [("shm", "shm")] * 2

    def test_without_init_sync_the_first_backward_chooses(self) -> None:
        def run() -> tuple[str, str]:
            torch.manual_seed(0)
            ddp = DDP(nn.Linear(3, 2), init_sync=False)
            before = ddp.stats().transport
            step(ddp)
            return before, ddp.stats().transport

        assert run_ranks(2, run) == [("not chosen before the first backward", "shm")] * 2

    def test_another_group_later(self) -> None:
        def run() -> list[str]:
            ddp = DDP(nn.Linear(3, 2))
            names = [ddp.stats().transport]
            ddp._update_process_group(dist.new_group())
            step(ddp)
            return [*names, ddp.stats().transport]

        assert run_ranks(2, run) == [["shm", "shm"]] * 2


class TestRoom:
    def test_more_gradients_than_the_arena_has_room_for(self) -> None:
        """Who keeps every step's gradients gets plain memory some time: slower, not wrong."""

        def run() -> int:
            ddp = DDP(nn.Linear(3000, 3000, bias=False), transport="shm")
            arena = ddp._transport.resolve()._arena
            kept, outside = [], 0
            for number in range(12):
                ddp.zero_grad()
                value = float(number + dist.get_rank())
                ddp(torch.full((1, 3000), value)).sum().backward()
                kept.append(next(ddp.parameters()).grad)
                outside += arena.offset_of(kept[-1]) is None
            assert all(bool((g == n + 0.5).all()) for n, g in enumerate(kept))
            return outside

        for outside in run_ranks(2, run):
            assert 1 <= outside <= 8
