"""The fork server: children at any time, and nothing that outlives its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.launch.child import Child, ForkServerError
from paceline.launch.exits import exit_summary
from paceline.launch.fork_server import ForkServer, shared_fork_server
from paceline.launch.wire import EndPolicy
from tests.children import FORKS
from tests.system import is_running, wait_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One without torch: it is there in a tenth of a second."""
    with ForkServer(["numpy.random"], path=sys.path) as made:
        yield made


@contextlib.contextmanager
def child_of(
    server: ForkServer,
    function: Callable[..., object] | None,
    *args: object,
    end: EndPolicy | None = None,
) -> Iterator[Child]:
    child = server.fork(end or EndPolicy())
    try:
        if function is not None:
            child.run(function, *args)
        yield child
    finally:
        child.kill()
        child.wait()
        child.close()


# --- what children do ----------------------------------------------------------------------------


def return_number(_: Connection, number: int) -> int:
    return number


def echo(pipe: Connection) -> None:
    pipe.send(pipe.recv())


def look_around(pipe: Connection) -> None:
    import numpy

    with Path("/proc/self/status").open() as status:
        ignored = next(int(line.split()[1], 16) for line in status if line.startswith("SigIgn"))
    numbers = sorted(map(int, os.listdir("/proc/self/fd")))
    pipe.send(
        {
            "descriptors": [n for n in numbers if os.path.lexists(f"/proc/self/fd/{n}")],
            "pipe": pipe.fileno(),
            "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
            "ignored": [s.name for s in signal.Signals if ignored >> (s - 1) & 1],
            "random": numpy.random.random(),
        }
    )


def beget(pipe: Connection, leave_session: bool) -> None:
    """Have a child that ends by itself only if it is forgotten."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if leave_session:
            os.setsid()
        os.write(told, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
    pipe.send(pid)
    with contextlib.suppress(EOFError):
        pipe.recv()


def end_with_the_pipe(pipe: Connection, path: str) -> None:
    pipe.send(None)
    with contextlib.suppress(EOFError):
        pipe.recv()
    Path(path).write_text("in peace")


def fork_one_more(pipe: Connection) -> None:
    child = shared_fork_server().fork()
    child.run(echo)
    child.pipe.send((os.getpid(), child.pid))
    pipe.send(child.pipe.recv())
    pipe.recv()


def send_half_a_request(pipe: Connection) -> None:
    connection = shared_fork_server()._connection
    pipe.send(None)
    pipe.recv()
    socket.send_fds(connection, [b"?"], [0])
    with contextlib.suppress(ConnectionError):
        connection.recv(1)  # until the server has closed it
    pipe.send(None)
    pipe.recv()


# --- tests ---------------------------------------------------------------------------------------


def test_exit_codes_and_signals(server: ForkServer) -> None:
    for number in (0, 7):
        with child_of(server, return_number, number) as child:
            assert child.wait(DEADLINE_S) == number
            assert not child.is_running()
            assert 0 < child.ended_ns <= time.monotonic_ns()
    with child_of(server, time.sleep) as child:  # called with the pipe: a TypeError, printed
        assert child.wait(DEADLINE_S) == 1
    with child_of(server, echo) as child:
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == -signal.SIGTERM
        child.send_signal(signal.SIGTERM)  # nothing happens
    assert exit_summary(-9) == "killed by SIGKILL"
    assert exit_summary(-63) == "killed by signal 63"
    assert exit_summary(3) == "exited with code 3"


def test_spares_wait_for_an_order(server: ForkServer) -> None:
    with child_of(server, None) as first, child_of(server, None) as spare:
        assert first.pid != spare.pid
        assert first.is_running()
        assert spare.is_running()
        first.kill()
        assert first.wait(DEADLINE_S) == -signal.SIGKILL
        spare.run(echo)
        spare.pipe.send("in its place")
        assert spare.pipe.recv() == "in its place"
    with child_of(server, None) as unused:
        unused.pipe.close()
        assert unused.wait(DEADLINE_S) == 0


def test_a_child_is_like_a_new_process(server: ForkServer) -> None:
    with (
        child_of(server, echo),
        child_of(server, look_around) as one,
        child_of(server, look_around) as two,
    ):
        found, other = one.pipe.recv(), two.pipe.recv()
    assert found["descriptors"] == [0, 1, 2, found["pipe"]], "it has what is the server's"
    assert found["leads"]
    # A shell lets what it starts in the background ignore SIGQUIT: so does this process then.
    inherited = {"SIGQUIT"} if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN else set()
    assert set(found["ignored"]) <= {"SIGPIPE", "SIGXFSZ"} | inherited, "Python ignores these"
    assert found["random"] != other["random"]


@pytest.mark.parametrize("leave_session", [False, True], ids=["in the session", "left it"])
def test_children_of_children_end_too(server: ForkServer, leave_session: bool) -> None:
    with child_of(server, beget, leave_session) as child:
        grandchild = child.pipe.recv()
        child.close()
        wait_gone(grandchild)


def test_what_left_the_session_and_its_parent_ends_with_the_server() -> None:
    with ForkServer([], path=sys.path) as server, child_of(server, beget, True) as child:
        grandchild = child.pipe.recv()
        child.pipe.close()
        assert child.wait(DEADLINE_S) == 0
        assert is_running(grandchild)
    wait_gone(grandchild)


def test_time_to_end_in_peace(server: ForkServer, tmp_path: Path) -> None:
    patient = EndPolicy(first=None, grace_s=DEADLINE_S)
    with child_of(server, end_with_the_pipe, str(tmp_path / "note"), end=patient) as child:
        child.pipe.recv()
        pid = child.pid
        child.close()
        wait_gone(pid)
    assert (tmp_path / "note").read_text() == "in peace"


def test_the_server_is_killed(tmp_path: Path) -> None:
    with ForkServer([], path=sys.path) as server, child_of(server, beget, False) as child:
        grandchild = child.pipe.recv()
        assert child.pid
        os.kill(server.pid, signal.SIGKILL)
        assert child.wait(DEADLINE_S) == -signal.SIGKILL
        wait_gone(child.pid)
        with pytest.raises(ForkServerError):
            assert server.fork().pid
        os.kill(grandchild, signal.SIGKILL)  # nobody is left who could


def test_a_child_that_may_fork(server: ForkServer) -> None:
    child = server.fork(may_fork=True)
    child.run(fork_one_more)
    parent, sibling = child.pipe.recv()
    assert parent == child.pid
    child.kill()  # what it owned goes too
    wait_gone(sibling)
    child.close()


def test_a_request_that_is_cut_short_leaves_no_descriptor(server: ForkServer) -> None:
    child = server.fork(may_fork=True)
    child.run(send_half_a_request)
    with contextlib.closing(child):
        child.pipe.recv()
        before = os.listdir(f"/proc/{server.pid}/fd")
        child.pipe.send(None)
        child.pipe.recv()
        assert len(os.listdir(f"/proc/{server.pid}/fd")) == len(before) - 1, "the connection"
        child.kill()
        child.wait()


@pytest.mark.parametrize("way", [way for way in FORKS if way != "preexec_fn"])
def test_a_fork_of_the_owner_holds_nothing_alive(way: str, server: ForkServer) -> None:
    """In Python's children the handles are closed; they cannot end what is their parent's."""
    with child_of(server, echo) as child:
        assert FORKS[way](child.kill) == 0
        child.pipe.send(1)
        assert child.pipe.recv() == 1


OWNER = """
import os, sys, time
from paceline.launch.fork_server import ForkServer
from tests.launch.test_fork_server import beget
server = ForkServer([], path=sys.path)
children = [server.fork() for _ in range(2)]
for child in children:
    child.run(beget, False)
pids = [server.pid, *(child.pid for child in children), *(child.pipe.recv() for child in children)]
import ctypes
if ctypes.PyDLL(None).fork() == 0:  # it has copies of all descriptors, and lives on
    time.sleep(600)
print(*pids, flush=True)
time.sleep(600)
"""


def test_the_owner_is_killed() -> None:
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 5
        owner.kill()
        try:
            for pid in pids:
                wait_gone(pid)
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
