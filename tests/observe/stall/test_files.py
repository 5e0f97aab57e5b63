"""Files of the watchdog: whole or not at all, checked when read; one claim for one stall."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.observe.run_folder import RunFolder
from paceline.observe.stall import claims as claims_module
from paceline.observe.stall import stacks
from paceline.observe.stall.account import (
    Account,
    WatchInfo,
    read_account,
    read_watch_info,
    write_json,
)
from paceline.observe.stall.claims import Claims
from paceline.observe.stall.locks import describe_lock_waits
from paceline.observe.stall.stacks import (
    StackWriter,
    ask_all_stacks,
    ask_stacks,
    fold,
    innermost_place,
)
from paceline.processes import (
    catches_signal,
    start_ticks,
)


def test_accounts_come_back_as_they_were_written(tmp_path: Path) -> None:
    account = Account(1, "t", 5, where="in forward", collectives=("a", "b"), is_waiting=True)
    old = os.umask(0)
    try:
        write_json(tmp_path / "a", account)
    finally:
        os.umask(old)
    assert read_account(tmp_path / "a") == account
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": "1"}', '{"rank": 1}', "\x00" * 100])
def test_what_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    assert read_account(tmp_path / "a") is None
    assert read_watch_info(tmp_path / "a") is None
    assert read_account(tmp_path / "missing") is None


def test_one_claim_for_one_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Claims(RunFolder(tmp_path)), Claims(RunFolder(tmp_path))
    assert first.claim(1)
    assert not second.claim(1)
    assert not second.is_abandoned(1)
    monkeypatch.setattr(claims_module, "REPORT_WAIT_S", 0.0)
    assert second.is_abandoned(1), "the first has died: the second takes over"
    second.write_report(1, "Stall 1: rank 0\nmore")
    assert first.newest_report() == 1
    assert first.first_line(1) == "Stall 1: rank 0"
    assert Claims(RunFolder(tmp_path)).newest_report() == 0, "what is old is not shown again"
    first.forget(1)
    assert first.next_number() == 2
    assert first.claim(2)
    first.give_up(2)
    second.forget(1)
    assert second.claim(2)


CLAIMER = """
import sys
from paceline.observe.run_folder import RunFolder
from paceline.observe.stall.claims import Claims
print(Claims(RunFolder(sys.argv[1])).claim(1), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_claimer_that_dies_or_is_stopped_is_waited_for_no_longer(
    fate: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "REPORT_WAIT_S", 1e6)
    second, third = Claims(RunFolder(tmp_path)), Claims(RunFolder(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as claimer:
        try:
            assert claimer.stdout is not None
            assert claimer.stdout.readline() == "True\n"
            assert not second.claim(1)
            assert not third.claim(1)
            assert not second.is_abandoned(1), "it makes its report"
            claimer.send_signal(fate)
            if fate == signal.SIGKILL:
                claimer.wait()
            until_s = time.monotonic() + 60
            while not second.is_abandoned(1):
                assert time.monotonic() < until_s
            assert not third.is_abandoned(1), "one takes over"
            assert not third.is_abandoned(1), "and it lives"
        finally:
            claimer.kill()


def test_a_claim_that_says_nothing_is_left_alone(tmp_path: Path) -> None:
    for text in ("", "{", '{"space": "elsewhere", "pid": 1, "started": 1}'):
        (tmp_path / "stall-1.claim").write_text(text)
        claims = Claims(RunFolder(tmp_path))
        assert not claims.claim(1)
        assert not claims.is_abandoned(1)


def test_stacks_of_this_process_by_signal(tmp_path: Path) -> None:
    writer = StackWriter(tmp_path / "stacks")
    try:
        assert catches_signal(os.getpid(), writer.signal)
        pid = os.getpid()
        thread = threading.main_thread().native_id or 0
        watch = WatchInfo(0, "", "", pid, start_ticks(pid), thread, writer.signal, "")
        text = ask_stacks(watch, tmp_path / "stacks")
        assert "test_stacks_of_this_process_by_signal" in text
        assert __file__ in innermost_place(text) or innermost_place(text)
        number = writer.signal
    finally:
        writer.close()
    assert signal.getsignal(number) is signal.SIG_DFL
    assert ask_stacks(watch, tmp_path / "stacks") == "", "it would kill the process"


RANK = """
import sys, threading, pathlib
from paceline.observe.stall.stacks import StackWriter
number = sys.argv[1]
# It says that it is there from inside of the function that its stack is to show.
exec(f"def in_rank_{number}(): print(writer.signal, flush=True); sys.stdin.read()")
writer = StackWriter(pathlib.Path(sys.argv[2]))
globals()[f"in_rank_{number}"]()
"""


def test_all_are_asked_before_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six ranks that have a handler: half of them write nothing, and cost no second each."""
    monkeypatch.setattr(stacks, "_WAIT_S", 60.0)
    order: list[str] = []
    send, read = stacks.signal_thread, stacks._read_from
    monkeypatch.setattr(
        stacks, "signal_thread", lambda *words: (order.append("asked"), send(*words))[1]
    )
    monkeypatch.setattr(
        stacks, "_read_from", lambda *words: (order.append("read"), read(*words))[1]
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children, asked = [], []
    with contextlib.ExitStack() as stack:
        for number in range(6):
            path = tmp_path / f"stacks{number}"
            command = [sys.executable, "-c", RANK, str(number), str(path)]
            child = stack.enter_context(subprocess.Popen(command, **pipes, text=True))  # type: ignore[call-overload]
            stack.callback(child.kill)
            children.append(child)
        for number, child in enumerate(children):
            signal_number = int(child.stdout.readline())
            path = tmp_path / f"stacks{number}"
            if number % 2:
                path = tmp_path / f"others{number}"  # what it writes is not seen
                path.touch()
            started = start_ticks(child.pid)
            watch = WatchInfo(number, "", "", child.pid, started, child.pid, signal_number, "")
            asked.append((watch, path))
        answered = ask_all_stacks(asked[::2])
        order.clear()
        monkeypatch.setattr(stacks, "_WAIT_S", 0.1)
        rounds: list[float] = []
        sleep = time.sleep
        monkeypatch.setattr(time, "sleep", lambda s: (rounds.append(s), sleep(s))[1])
        assert ask_all_stacks(asked[1::2]) == [""] * 3
        assert len(rounds) <= 5, "one common deadline"
    assert [f"in_rank_{n}" in text for n, text in zip((0, 2, 4), answered, strict=True)] == [
        True
    ] * 3
    assert order[:3] == ["asked"] * 3
    assert "asked" not in order[3:]


def test_two_threads_that_wait_for_each_other() -> None:
    first, second = threading.Lock(), threading.RLock()
    has = [threading.Event(), threading.Event()]
    is_done = threading.Event()

    def one() -> None:
        with first:
            has[0].set()
            has[1].wait()
            while not is_done.is_set() and not second.acquire(timeout=0.5):
                pass

    def two() -> None:
        with second:
            has[1].set()
            has[0].wait()
            with first:
                pass

    threads = [threading.Thread(target=each, name=each.__name__) for each in (two, one)]
    for thread in threads:
        thread.start()
    names = {thread.ident: thread.name for thread in threads}
    told, until_s = "", time.monotonic() + 60
    while told.count("waits for the lock") < 2 and time.monotonic() < until_s:
        time.sleep(0.01)  # they may still be on their way there
        frames = sys._current_frames()
        told = describe_lock_waits({i: frames[i] for i in names if i in frames}, names)  # type: ignore[misc]
    is_done.set()
    for thread in threads:
        thread.join()
    assert told.startswith("a deadlock, it seems")
    assert "thread two waits for the lock first" in told
    assert "thread one waits for the lock second, held by thread two" in told


def test_frames_of_torch_are_folded() -> None:
    line = '  File "/x/site-packages/torch/nn/module.py", line 1 in _call'
    user = '  File "/x/train.py", line 1 in main'
    assert fold([line] * 3 + [line] * 5 + [user]) == [
        *[line] * 3,
        "  ... 5 of torch's or Paceline's",
        user,
    ]
