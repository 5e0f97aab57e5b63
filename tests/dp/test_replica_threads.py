"""Threads that stay, end by themselves, and stop when the caller is interrupted."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.dp import replica_threads as threads_module
from paceline.dp.parallel_apply import tell_where
from paceline.dp.replica_threads import POOL
from tests.dp.compare import CPUS


def replica_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("paceline replica")]


class ThreadIds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x),), threading.get_ident(), dtype=torch.long)


def test_the_same_threads_run_every_forward() -> None:
    model = paceline.DataParallel(ThreadIds(), ["cpu"] * 3)
    x = torch.zeros(3)
    first = model(x)
    assert len(set(first.tolist())) == 3
    assert threading.get_ident() not in first
    for _ in range(20):
        assert torch.equal(model(x), first)
    assert len(replica_threads()) == 3


def test_wrappers_share_crews_and_one_piece_runs_on_the_callers_thread() -> None:
    x = torch.zeros(2)
    first = paceline.DataParallel(ThreadIds(), CPUS)(x)
    assert torch.equal(paceline.DataParallel(ThreadIds(), CPUS)(x), first)
    assert paceline.DataParallel(ThreadIds(), CPUS)(x[:1]).item() == threading.get_ident()


def test_an_idle_crew_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "IDLE_S", 0.05)
    model = paceline.DataParallel(ThreadIds(), CPUS)
    model(torch.zeros(2))
    until_s = time.monotonic() + 60
    while replica_threads() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not replica_threads()
    model(torch.zeros(2))  # and a new one comes


def test_a_crew_that_is_busy_for_longer_than_the_idle_time_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads_module, "IDLE_S", 0.02)

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 if x.item() == 0 else 0.2)  # the first replica is idle meanwhile
        return x

    x = torch.arange(2)
    for _ in range(2):
        out = paceline.parallel_apply([slow, slow], [(x[0],), (x[1],)])
        assert [t.item() for t in out] == [0, 1]


@pytest.fixture(params=[None, 1e-6], ids=["", "switching all the time"])
def switch_interval(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make threads change places between nearly any two bytecodes: as far as a GIL allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param or before)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    model = paceline.DataParallel(nn.Linear(8, 8), CPUS)
    x = torch.randn(4, 8)
    with torch.no_grad():
        expected = model.module(x)
    wrong: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            for _ in range(50):
                found = model(x)
                if not torch.allclose(found, expected):
                    wrong.append(found)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(replica_threads()) <= 8


def test_a_wrapper_inside_of_a_wrapper() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.Sequential(nn.Linear(4, 4), paceline.DataParallel(inner, CPUS))
    outer = paceline.DataParallel(model, CPUS)
    x = torch.randn(8, 4)
    outer(x).sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plain = nn.Sequential(model[0], inner)
    torch.testing.assert_close(outer(x), plain(x))
    plain(x).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


class Endless(nn.Module):
    """Runs until it is interrupted, which happens as soon as both replicas run."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.both_run = threading.Barrier(2, lambda: os.kill(os.getpid(), number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.min() >= 0:
            self.both_run.wait()
        while x.min() >= 0:
            time.sleep(0.005)
        return x


def test_ctrl_c_ends_all_replicas_and_the_wrapper_stays_usable() -> None:
    model = paceline.DataParallel(Endless(signal.SIGINT), CPUS)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2))
    assert not replica_threads()
    assert model(-torch.ones(2)).tolist() == [-1, -1]


def test_a_signal_that_does_not_wake_the_caller_ends_them_all_the_same() -> None:
    """Its handler ran on another thread, or just before the caller began to wait."""
    module = Endless(signal.SIGINT)
    module.both_run = threading.Barrier(
        2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        paceline.DataParallel(module, CPUS)(torch.ones(2))
    assert not replica_threads()


def test_an_exception_of_a_signal_handler_ends_them_too() -> None:
    def alarm(*_: object) -> None:
        raise TimeoutError("too slow")

    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with pytest.raises(TimeoutError, match="too slow"):
            paceline.DataParallel(Endless(signal.SIGUSR1), CPUS)(torch.ones(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not replica_threads()


def test_an_interrupt_that_comes_too_late_for_a_job_only_ends_the_thread() -> None:
    with POOL.lend(2) as threads:
        threads.run([lambda: None, lambda: None])
        threads._interrupt()
    assert not replica_threads()


def test_a_forked_child_has_its_own_threads() -> None:
    """Of Python jobs: whether torch's own thread pools survive a fork is not ours to say."""

    def work() -> list[Any]:
        with POOL.lend(2) as threads:
            return [outcome.value for outcome in threads.run([lambda: 1, lambda: 2])]

    assert work() == [1, 2]
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() == [1, 2] else 1)
        finally:
            os._exit(2)
    until_s = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until_s:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_the_interpreter_ends_at_once_with_an_idle_crew() -> None:
    script = (
        "import torch, paceline, paceline.dp.replica_threads\n"
        "paceline.dp.replica_threads.IDLE_S = 1000.0\n"
        "paceline.DataParallel(torch.nn.Linear(2, 2), ['cpu', 'cpu'])(torch.ones(2, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr == ""


def test_exceptions_keep_type_arguments_and_traceback_and_name_the_replica() -> None:
    class Odd(Exception):
        def __init__(self, code: int, *, detail: str) -> None:
            super().__init__(code)
            self.detail = detail

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                raise Odd(7, detail="x") from KeyError("cause")
            return x

    model = paceline.DataParallel(Fails(), CPUS)
    with pytest.raises(Odd) as caught:
        model(torch.tensor([0.0, 1.0]))
    error = caught.value
    assert (error.args, error.detail) == ((7,), "x")
    assert isinstance(error.__cause__, KeyError)
    assert error.__notes__ == [
        "Caught Odd in replica 1 on device cpu. Raised by replica 1 of 2, on cpu."
    ]
    assert caught.traceback[-1].name == "forward"
    assert "raise Odd" in str(caught.traceback[-1].statement)
    assert torch.equal(model(torch.zeros(2)), torch.zeros(2))


def test_a_failed_forward_waits_for_the_other_replicas() -> None:
    finished: list[float] = []

    def work(x: torch.Tensor) -> None:
        if x.item() == 0:
            raise ValueError("first")
        time.sleep(0.1)
        finished.append(x.item())

    with pytest.raises(ValueError, match="first"):
        paceline.parallel_apply([work, work], list(torch.arange(2)))
    assert finished == [1]


def test_an_exception_makes_no_reference_cycle() -> None:

    def fail(x: torch.Tensor) -> None:
        raise ValueError("no")

    def attempt() -> None:
        with contextlib.suppress(ValueError):
            paceline.parallel_apply([fail, fail], [torch.zeros(1), torch.zeros(1)])

    attempt()
    gc.collect()
    attempt()
    assert gc.collect() == 0


def test_system_exit_reaches_the_caller() -> None:
    with pytest.raises(SystemExit):
        paceline.parallel_apply([sys.exit, sys.exit], [(3,), (3,)], devices=CPUS)


@pytest.mark.parametrize(
    ("inputs", "kwargs", "devices", "name"),
    [
        ([1], None, None, "inputs"),
        ([1, 2], [{}], None, "kwargs_tup"),
        ([1, 2], None, ["cpu"], "devices"),
    ],
)
def test_lengths_must_agree(inputs: Any, kwargs: Any, devices: Any, name: str) -> None:
    with pytest.raises(AssertionError, match=f"modules 2 is not .* number of {name} 1") as caught:
        paceline.parallel_apply([abs, abs], inputs, kwargs, devices)
    assert isinstance(caught.value, paceline.errors.ReplicaCountError)


def test_when_a_thread_cannot_be_started_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "paceline replica 1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        paceline.parallel_apply([abs, abs], [(1,), (2,)], devices=CPUS)
    until_s = time.monotonic() + 60
    while replica_threads() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not replica_threads()


def test_nothing_to_apply() -> None:
    assert paceline.parallel_apply([], []) == []


def test_before_notes_existed_a_cause_names_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    error = ValueError("no")
    tell_where(error, "Raised by replica 1.")
    assert str(error.__cause__) == "Raised by replica 1."
    assert not hasattr(error, "__notes__")
    caused = ValueError("no")
    caused.__cause__ = KeyError("own")
    tell_where(caused, "Raised by replica 1.")
    assert isinstance(caused.__cause__, KeyError)
