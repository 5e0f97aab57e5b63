"""A rank's account has its last reductions, with the same numbers on all ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paceline import DistributedDataParallel as DDP
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.own_account import describe_self
from paceline.testing import run_ranks
from tests.ddp.compare import batch
from tests.ddp.models import mlp

STEPS = 3


def account(transport: str, folder: str) -> tuple[list[str], list[str], int]:
    """What is told in the middle of a backward, and what after the last."""
    ddp = DDP(mlp(4), bucket_cap_mb=1e-4, transport=transport)
    first = next(ddp.parameters())  # the last one to get a gradient
    inside: list[str] = []

    def look(gradient: torch.Tensor) -> torch.Tensor:
        inside[:] = tell(folder)
        return gradient

    first.register_hook(look)
    for step in range(STEPS):
        ddp(batch(step)).square().mean().backward()
    return inside, tell(folder), len(ddp.stats().buckets)


def tell(folder: str) -> list[str]:
    told = describe_self(RunFolder(folder), 0, "").collectives
    return [line for line in told if line.startswith("reduction #")]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_reductions_are_numbered_alike(transport: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    found = run_ranks(2, account, transport, folder, env={"PACELINE_RUN_DIR": folder})
    for inside, after, buckets in found:
        assert buckets > 1, "one to reduce while another is still to come"
        numbers = [int(re.findall(r"#(\d+)", line)[0]) for line in after]
        assert numbers == list(range(numbers[0], numbers[0] - len(numbers), -1))
        assert len(numbers) >= buckets
        assert after[0].startswith(
            f"reduction #{numbers[0]}, bucket {buckets - 1} (of {buckets}) in step {STEPS}, done "
        )
        # Of the step under way only what has begun; then those of the step before.
        begun = [line for line in inside if f"in step {STEPS}, " in line]
        assert 0 < len(begun) < buckets
        assert any(f"in step {STEPS - 1}, done " in line for line in inside)
        assert int(re.findall(r"#(\d+)", begun[0])[0]) < numbers[0]
    assert [[line.split(", ")[:2] for line in after] for _, after, _ in found[:1]] == [
        [line.split(", ")[:2] for line in after] for _, after, _ in found[1:]
    ]
