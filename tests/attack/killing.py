"""Trains on a few ranks until one of them is killed, and tells what each survivor raised, and when.

The killer is a thread of the caller: SIGKILL comes from outside, at any instruction of the victim.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.nn import SyncBatchNorm
from paceline.testing import RanksFailedError, run_ranks
from paceline.testing.failures import Outcome

HANGS_AFTER_S = 45.0
"""A survivor that has not raised by then hangs."""


@dataclass(frozen=True)
class Attack:
    """One kill.

    Attributes:
        kind: What the ranks do, see ``JOBS``.
        ranks: How many.
        victim: Which of them is killed.
        delay_s: How long after the victim has said that it is there.
        before: The victim says so before it builds the wrapper, or after its first step.
        transport: Of the wrapper.
    """

    kind: str
    ranks: int
    victim: int
    delay_s: float
    before: str = "training"
    transport: str = "auto"


@dataclass(frozen=True)
class Survivor:
    """What one rank saw. Times are of the monotonic clock, which all processes share."""

    rank: int
    error: BaseException
    phase: str
    entered_s: float
    raised_s: float


@dataclass(frozen=True)
class Aftermath:
    """What became of an attack."""

    attack: Attack
    pid: int
    killed_s: float
    was_built: bool
    survivors: tuple[Survivor, ...]

    def waits_s(self) -> list[float]:
        """How long each survivor took, from the kill or from its last call, what came later."""
        return [s.raised_s - max(self.killed_s, s.entered_s) for s in self.survivors]

    def wrong(self) -> list[str]:
        """The survivors that did not name the victim."""
        victim = self.attack.victim
        return [
            f"{self.attack}: rank {s.rank} in {s.phase}: {type(s.error).__name__} "
            f"rank={getattr(s.error, 'rank', None)} pid={getattr(s.error, 'pid', None)} "
            f"(wanted {victim}, pid {self.pid}): {str(s.error)[:300]}"
            for s in self.survivors
            if getattr(s.error, "rank", None) != victim or s.error.pid not in self._pids()
        ]

    def _pids(self) -> tuple[int, ...]:
        """What a survivor may say: a rank that dies as the first thing it does is a number only."""
        return (self.pid,) if self.was_built else (self.pid, 0)


class Net(nn.Module):
    """A few layers, some buckets; with the normalisation that is asked for."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Linear(16, 16), norm(16), nn.Linear(16, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Diary:
    """Which phase a rank is in, and since when."""

    def __init__(self) -> None:
        self.phase = ""
        self.entered_s = 0.0

    def enter(self, phase: str) -> None:
        self.phase, self.entered_s = phase, time.monotonic()


Job = Callable[["Attack", Diary, Callable[[], None]], None]


def step(ddp: DDP, diary: Diary, sync: AbstractContextManager[None] | None = None) -> None:
    with sync or nullcontext():
        diary.enter("forward")
        loss = ddp(torch.randn(4, 8)).square().mean()
        diary.enter("backward")
        loss.backward()
    ddp.zero_grad()


def build(attack: Attack, diary: Diary, norm: Callable[[int], nn.Module]) -> DDP:
    net = Net(norm)
    if dist.get_rank() == attack.victim and attack.before == "construction":
        _write(Path(os.environ["ATTACK_DIRECTORY"]) / "pid", str(os.getpid()).encode())
    diary.enter("constructor")
    return DDP(net, bucket_cap_mb=0.0005, transport=attack.transport)


def train_steps(ddp: DDP, diary: Diary, tell: Callable[[], None]) -> None:
    step(ddp, diary)
    tell()
    while True:
        step(ddp, diary)


def batch_norm(attack: Attack, diary: Diary, tell: Callable[[], None]) -> None:
    train_steps(build(attack, diary, nn.BatchNorm1d), diary, tell)


def sync_batch_norm(attack: Attack, diary: Diary, tell: Callable[[], None]) -> None:
    train_steps(build(attack, diary, SyncBatchNorm), diary, tell)


def hooked(attack: Attack, diary: Diary, tell: Callable[[], None]) -> None:
    ddp = build(attack, diary, nn.LayerNorm)
    name = ("bf16", "int8", "powersgd")[attack.ranks % 3]
    diary.enter("registration of a hook")
    hooks.register(ddp, name)
    train_steps(ddp, diary, tell)


def joined(attack: Attack, diary: Diary, tell: Callable[[], None]) -> None:
    """Ranks run out of inputs one after the other, and start over."""
    ddp = build(attack, diary, nn.BatchNorm1d)
    step(ddp, diary)
    tell()
    while True:
        diary.enter("join")
        with ddp.join():
            for _ in range(1 + 3 * dist.get_rank()):
                step(ddp, diary)
            diary.enter("the end of join")


def not_synced(attack: Attack, diary: Diary, tell: Callable[[], None]) -> None:
    ddp = build(attack, diary, nn.BatchNorm1d)
    step(ddp, diary)
    tell()
    while True:
        step(ddp, diary, ddp.no_sync())
        step(ddp, diary, ddp.no_sync())
        step(ddp, diary)


JOBS: dict[str, Job] = {
    "batch norm": batch_norm,
    "sync batch norm": sync_batch_norm,
    "hooks": hooked,
    "join": joined,
    "no_sync": not_synced,
}


def work_until_killed(attack: Attack, directory: Path) -> None:
    """What each rank runs. Every rank ends by an exception, but for the victim."""
    rank, diary = dist.get_rank(), Diary()

    def tell() -> None:
        if rank == attack.victim and attack.before == "training":
            _write(directory / "pid", str(os.getpid()).encode())
        (directory / f"built{rank}").touch()

    os.environ["ATTACK_DIRECTORY"] = str(directory)
    try:
        JOBS[attack.kind](attack, diary, tell)
    except BaseException as error:
        raised_s = time.monotonic()
        survivor = Survivor(rank, error, diary.phase, diary.entered_s, raised_s)
        _write(directory / f"survivor{rank}", pickle.dumps(survivor))
        raise


def carry_out(attack: Attack, directory: Path) -> Aftermath:
    """Kill, and wait until everybody has raised."""
    directory.mkdir()
    fired: list[tuple[int, float]] = []
    killer = threading.Thread(target=_kill, args=(attack, directory, fired))
    killer.start()
    try:
        with pytest.raises(RanksFailedError) as failed:
            run_ranks(
                attack.ranks,
                work_until_killed,
                attack,
                directory,
                timeout_s=2 * HANGS_AFTER_S,
                grace_s=HANGS_AFTER_S,
            )
    finally:
        killer.join()
    outcomes = {failure.rank: failure.outcome for failure in failed.value.failures}
    assert fired, "the victim never came"
    assert outcomes.pop(attack.victim) is Outcome.EXITED, failed.value
    assert len(outcomes) == attack.ranks - 1, failed.value
    assert set(outcomes.values()) == {Outcome.RAISED}, f"{attack}: {failed.value}"
    survivors = [
        pickle.loads((directory / f"survivor{rank}").read_bytes()) for rank in sorted(outcomes)
    ]
    was_built = (directory / f"built{attack.victim}").exists()
    return Aftermath(attack, *fired[0], was_built, tuple(survivors))


def _kill(attack: Attack, directory: Path, fired: list[tuple[int, float]]) -> None:
    """Wait for the victim's pid, then for the moment, then kill."""
    until_s = time.monotonic() + HANGS_AFTER_S
    while not (directory / "pid").exists():
        if time.monotonic() > until_s:
            return
        time.sleep(0.001)
    time.sleep(attack.delay_s)
    pid = int((directory / "pid").read_text())
    os.kill(pid, signal.SIGKILL)  # raises if it has ended before
    fired.append((pid, time.monotonic()))


def _write(path: Path, data: bytes) -> None:
    """All at once, for whoever waits for the file."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.rename(path)


def random_attack(seed: int, kind: str, ranks: int, **more: Any) -> Attack:
    """Draw victim and moment."""
    draw = random.Random(f"{seed} {kind} {ranks} {more}")
    longest_s = 0.06 if more.get("before") == "construction" else 0.25
    return Attack(kind, ranks, draw.randrange(ranks), draw.uniform(0, longest_s), **more)
