"""Children of every kind in tests: made, waited for, never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from paceline.launch.child import Child
from paceline.launch.exits import leave
from paceline.launch.fork_server import shared_fork_server

DEADLINE_S = 60.0
"""Only ends a child that hangs."""

Deed = Callable[[], None]


def wait_for(pid: int, deadline_s: float = DEADLINE_S) -> int:
    """The exit code of a child; one that hangs is killed, and that is its code."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def child_process(target: Callable[..., None], *args: Any) -> Iterator[Child]:
    """Call ``target(pipe, *args)`` in a child of the warm fork server; killed on the way out."""
    child = shared_fork_server().fork()
    try:
        child.run(_run_and_leave, target, args)
        yield child
    finally:
        child.kill()
        child.wait()
        child.close()


@contextlib.contextmanager
def server_process(target: Callable[..., None], *args: Any) -> Iterator[tuple[str, Child]]:
    """The same for a server, which sends its address; it must end well when it is told to."""
    with child_process(target, *args) as child:
        assert child.pipe.poll(DEADLINE_S), "the server did not start"
        yield child.pipe.recv(), child
        assert child.is_running(), "the server died"
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == 0


def _run_and_leave(pipe: Connection, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        target(pipe, *args)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def begin_in_fork(deed: Deed, fork: Callable[[], int] = os.fork) -> int:
    """Do something in a child, which ends at once after it; 0 is its code if it raised nothing."""
    pid = fork()
    if pid == 0:
        code = 1
        try:
            deed()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def do_in_fork(deed: Deed, fork: Callable[[], int] = os.fork) -> int:
    """The same, and wait for its exit code."""
    return wait_for(begin_in_fork(deed, fork))


@contextlib.contextmanager
def children_allowed() -> Iterator[None]:
    """Let a rank have children of multiprocessing: it is a daemon, which may not."""
    config: Any = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    was_daemon = config.pop("daemon", None)
    try:
        yield
    finally:
        if was_daemon is not None:
            config["daemon"] = was_daemon


def do_by_multiprocessing(deed: Deed, method: str = "fork") -> int:
    """By a start method of multiprocessing; other than by ``fork``, the deed is pickled."""
    with children_allowed():
        process: Any = multiprocessing.get_context(method).Process(target=deed)
        process.start()
        process.join(DEADLINE_S)
    code: int | None = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return -1 if code is None else code


def do_before_exec(deed: Deed) -> int:
    """As ``preexec_fn``; what raises there raises here."""
    done = subprocess.run([sys.executable, "-S", "-c", ""], preexec_fn=deed, check=False)
    return done.returncode


FORKS: dict[str, Callable[[Deed], int]] = {
    "os.fork": do_in_fork,
    # With the interpreter lock, which the child needs; Python's own handlers do not run.
    "fork from C": partial(do_in_fork, fork=ctypes.PyDLL(None).fork),
    "multiprocessing": do_by_multiprocessing,
    "preexec_fn": do_before_exec,
}
"""Ways to fork: each does a deed in a child, and returns the exit code."""


def in_child(way: str, deed: Deed) -> None:
    """Do something in a child, and see that it went well there."""
    sys.stdout.flush()
    code = FORKS[way](deed)
    assert code == 0, f"the child by {way} ended with {code}"
