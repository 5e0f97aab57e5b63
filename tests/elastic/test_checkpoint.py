"""``state.save`` and ``load``: whole or not there, at any number of ranks, bytes not trusted."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.elastic import DistributedSampler, State
from paceline.elastic.checkpoint import folder as folders
from paceline.elastic.checkpoint import reader, writer
from paceline.errors import CheckpointError, ConfigurationError
from paceline.testing import run_ranks


def make(seed: int = 0, width: int = 4) -> tuple[torch.nn.Module, State]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = DistributedSampler(64, 8)
    return model, State(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, step=0, name="a"
    )


def train(model: torch.nn.Module, state: State, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.commit(batches=1)


def bits(model: torch.nn.Module) -> bytes:
    return b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    model, state = make()
    train(model, state, 3)
    state.save(tmp_path)
    train(model, state, 3)  # while it is written
    state.wait_saved()
    other, resumed = make(seed=9)
    assert resumed.load(tmp_path)
    assert (resumed.step, resumed.commits, resumed.sampler.position) == (3, 3, 3)
    train(other, resumed, 3)
    assert bits(other) == bits(model)
    assert resumed.scheduler.state_dict() == state.scheduler.state_dict()
    state.close()
    resumed.close()


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    model, state = make()
    (tmp_path / ".saving-000000001-dead").mkdir()  # left by a process that died
    (tmp_path / "notes").mkdir()  # not ours
    for _ in range(5):
        train(model, state, 1)
        state.save(tmp_path, keep=2)
    state.wait_saved()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes", "step-000000004", "step-000000005"]
    assert state.load(tmp_path / "step-000000004")
    assert state.step == 4
    state.close()


def save_for_ever(path: str) -> None:
    """Save again and again; what a child of the test below does until it is killed."""
    model, state = make()
    while True:
        train(model, state, 1)
        state.save(path, keep=2, wait=True)
        print(state.commits, flush=True)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_killed_in_the_middle_of_a_save(tmp_path: Path, how: signal.Signals) -> None:
    """Whenever it dies, what is there is whole, and no older than the last that was waited for."""
    code = "import sys, tests.elastic.test_checkpoint as test; test.save_for_ever(sys.argv[1])"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},  # the same bits
        text=True,
    )
    assert child.stdout is not None
    last = 0
    for line in child.stdout:
        last = int(line)
        if last == 5:
            break
    deadline_s = time.monotonic() + 60
    while not list(tmp_path.glob(".saving-*")) and time.monotonic() < deadline_s:
        pass  # until it is in the middle of one
    child.send_signal(how)
    last = max([last, *map(int, child.stdout.read().split())])
    child.stdout.close()
    child.wait(60)
    model, state = make(seed=5)
    assert state.load(tmp_path)
    assert state.step >= last >= 5
    expected, reference = make()
    train(expected, reference, state.step)
    assert bits(model) == bits(expected)
    state.save(tmp_path, wait=True)  # and what was left is cleaned up
    assert not list(tmp_path.glob(".*"))
    state.close()
    reference.close()


def test_at_another_number_of_ranks(tmp_path: Path) -> None:
    """Three ranks save, two go on; only rank 0 writes."""

    def saves() -> Any:
        ddp, state = _distributed()
        for _ in range(3):
            ddp(torch.ones(2, 3) * dist.get_rank()).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
            state.commit()
        state.save(tmp_path, wait=True)
        return bits(ddp), ddp.reducer.registered.hook.state.step

    def loads() -> Any:
        ddp, state = _distributed()
        assert not state.load(tmp_path / "nothing", missing_ok=True)
        state.load(tmp_path)
        assert state.sampler.position == 3
        ddp(torch.ones(2, 3)).sum().backward()
        return bits(ddp), ddp.reducer.registered.hook.state.step - 1

    assert set(run_ranks(3, saves)) == set(run_ranks(2, loads))


def _distributed() -> tuple[Any, State]:
    torch.manual_seed(dist.get_rank())
    ddp = DDP(torch.nn.Linear(3, 2))
    hooks.register(ddp, "int8")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(64, 8)
    return ddp, State(model=ddp, optimizer=optimizer, sampler=sampler, step=0)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    model, state = make()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        state.load(tmp_path)
    state.save(tmp_path, wait=True)
    folder = folders.find(tmp_path)
    assert folder is not None
    facts = json.loads((folder / folders.DESCRIPTION).read_text())

    def write(**changes: Any) -> None:
        (folder / folders.DESCRIPTION).write_text(json.dumps({**facts, **changes}))

    before = bits(model)
    write(format=7, paceline="9.0")
    with pytest.raises(CheckpointError, match=r"has format 7, written by Paceline '9.0'"):
        state.load(tmp_path)
    write(magic="something else")
    with pytest.raises(CheckpointError, match=r"was not written by state\.save"):
        state.load(tmp_path)
    (folder / folders.DESCRIPTION).write_text("{")
    with pytest.raises(CheckpointError, match="or is damaged"):
        state.load(tmp_path)
    write()
    _, wider = make(width=5)
    with pytest.raises(CheckpointError, match=r"module.0.0.weight is \[\[5, 3\]"):
        wider.load(tmp_path)
    assert bits(model) == before
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="could not be read"):
        state.load(tmp_path)
    for each in (state, wider):
        each.close()


class _OldMember(Enum):
    """As Python 3.11.2 pickles members."""

    ONE = 1

    def __reduce_ex__(self, _: Any) -> Any:
        return getattr, (type(self), self.name)


def test_members_of_enums_are_read_and_nothing_else_of_an_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(reader._ALLOWED, __name__, {"_OldMember"})
    monkeypatch.setitem(reader._ALLOWED, "os", {"environ"})

    def read(value: object) -> object:
        return reader._IndexUnpickler(io.BytesIO(pickle.dumps(value))).load()

    class Attack:
        def __init__(self, *asked: object) -> None:
            self.asked = asked

        def __reduce__(self) -> Any:
            return getattr, self.asked

    assert read(_OldMember.ONE) is _OldMember.ONE
    for asked in ((_OldMember, "__init__"), (_OldMember, "TWO"), ("", "format"), (1, "real")):
        with pytest.raises((CheckpointError, KeyError)):
            read(Attack(*asked))


def test_an_index_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'attacked'}",)

    _, state = make()
    state.save(tmp_path, wait=True)
    folder = folders.find(tmp_path)
    assert folder is not None
    (folder / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"asks for (posix|os).system"):
        state.load(tmp_path)
    assert not (tmp_path / "attacked").exists()
    state.close()


def test_a_save_that_fails_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, state = make()
    train(model, state, 1)
    state.save(tmp_path, wait=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_tensors", full)
        train(model, state, 1)
        state.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left"):
            state.wait_saved()
    assert state.load(tmp_path)
    assert state.step == 1
    state.close()


def test_a_save_is_of_the_step_that_was_committed(tmp_path: Path) -> None:
    """The copy is made at once: what training changes while it is written is not in it."""
    model, state = make()
    train(model, state, 1)
    expected = bits(model)
    gate = threading.Event()
    write = writer.write_tensors
    writer.write_tensors = lambda *args, **options: (gate.wait(60), write(*args, **options))  # type: ignore[assignment]
    try:
        state.save(tmp_path)
        train(model, state, 2)
        gate.set()
        state.wait_saved()
    finally:
        writer.write_tensors = write
    other, loaded = make(seed=3)
    loaded.load(tmp_path)
    assert bits(other) == expected
    model(torch.randn(5, 3)).sum().backward()
    state.optimizer.step()
    with pytest.raises(ConfigurationError, match=r"after state\.commit"):
        state.save(tmp_path)
    for each in (state, loaded):
        each.close()
