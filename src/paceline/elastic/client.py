"""A rank's end of the conversation with its launcher, and the thread that listens there.

The launcher passes on what is meant for the coordinator, and what comes from it.

Used by :mod:`paceline.elastic.session` in the thread that trains. The listening thread hears that
the epoch is over while the training thread may be blocked in a collective, and frees it.

[Note: told to end]
SIGTERM means: leave after the step. The handler writes one byte; the listening thread tells the
coordinator. When the launcher is gone, the handler ends the process as SIGTERM usually does.

[Note: who frees whom]
``end`` names the step after which the epoch is over, -1 after a death. The listener waits until
that step is committed here, so that nobody is torn out of a step that can still be completed. Then
it calls ``free`` again and again until the training thread has left: the training thread may enter
another collective before it sees that all is over. A lock makes sure that nothing is freed once it
has left: that might be the next epoch's.

[Note: the coordinator is away]
Nothing happens as long as nothing fails. If a collective fails, the rank waits for the coordinator
to come back (``away``, ``back``), which then ends the epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.elastic.handshake import connect, read_key
from paceline.elastic.hosts.lease_file import LeaseReader
from paceline.elastic.protocol import (
    DIRECTORY,
    MEMBER,
    key_path,
    lease_path,
    receive,
    send,
    socket_path,
)
from paceline.errors import MembershipError

logger = logging.getLogger("paceline.elastic")

FREE_EVERY_S = 0.05
HEAR_S = 2.0
"""How long after an error of a collective the coordinator may say that the epoch is over."""
ANSWER_S = 30.0
AWAY_S = 300.0
"""How long a rank waits for a coordinator that is away, or a launcher that does not let it in."""
_LAUNCHER_GONE = "the launcher is gone, and with it the other ranks of this host"


class CoordinatorClient:
    """The connection of one rank.

    Args:
        pipe: To the launcher.
        member: This process's number among the members.
        committed: Returns how many steps are committed.
        free: Makes the training thread leave whatever collective it is in.
        lease: Until when this rank may go on.
    """

    def __init__(
        self,
        pipe: Connection,
        member: int,
        committed: Callable[[], int],
        free: Callable[[], None],
        lease: LeaseReader | None = None,
    ) -> None:
        self.member = member
        self.ended_s = 0.0
        self.is_regrouping = False
        self.is_away = False
        self._lease = lease
        self._pipe = pipe
        self._committed = committed
        self._free = free
        self._decisions: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._free_lock = threading.Lock()  # [Note: who frees whom]
        self._is_told_to_end = self._is_lost = self._is_closed = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handler: Any = None
        self._catch_sigterm()
        self._thread = threading.Thread(target=self._listen, name="paceline-elastic", daemon=True)
        send(pipe, "hello", member=member, pid=os.getpid())
        self._thread.start()

    @classmethod
    def from_environment(
        cls, committed: Callable[[], int], free: Callable[[], None]
    ) -> CoordinatorClient | None:
        """Connect to the launcher that started this process; None if it is not elastic."""
        if DIRECTORY not in os.environ:
            return None
        directory = Path(os.environ[DIRECTORY])
        pipe = _reach_launcher(directory)
        lease = LeaseReader(lease_path(directory))
        return cls(pipe, int(os.environ[MEMBER]), committed, free, lease)

    # --- said by the training thread --------------------------------------------------------------
    def join(self) -> dict[str, Any]:
        """Say that this rank is there; wait for its place."""
        self._say("joined")
        return self.wait_decision()

    def ready(self, step: int, is_clean: bool) -> dict[str, Any]:
        """Say that this rank has left its epoch; wait for its place in the next."""
        with self._free_lock:
            self._left.set()
        self._say("ready", step=step, is_clean=is_clean)
        return self.wait_decision()

    def entered(self, event: dict[str, Any]) -> None:
        """Say that this rank trains."""
        self._say("entered", event=event)

    def broken(self, why: str) -> bool:
        """Say that a collective failed although nobody died; return whether the epoch is over."""
        self._say("broken", why=why)
        return self.wait_over(ANSWER_S)

    def missing(self, epoch: int, ranks: list[int]) -> None:
        """Say who has not come to the store of the new epoch, after a long wait."""
        self._say("missing", epoch=epoch, ranks=ranks)

    def done(self, step: int) -> bool:
        """Say that training is complete; return whether that holds for the job."""
        self._say("done", step=step)
        while True:
            if self._ended.is_set():
                return False
            try:
                message = self._decisions.get(timeout=FREE_EVERY_S)
            except queue.Empty:
                continue
            return message is None or _checked(message)["kind"] == "release"

    def wait_decision(self) -> dict[str, Any]:
        """Wait for ``begin`` or ``release``."""
        message = self._decisions.get()
        if message is None:
            raise MembershipError(_LAUNCHER_GONE)
        return _checked(message)

    def _begin(self) -> None:
        # In the listening thread: the word that this epoch is over may follow before the training
        # thread has woken up. New ones: a thread that frees the epoch before looks at its own.
        self._ended, self._left = threading.Event(), threading.Event()
        self.is_regrouping = False
        self.ended_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the present epoch has ended."""
        return self._ended.is_set()

    def wait_over(self, timeout_s: float = HEAR_S) -> bool:
        """Wait until the epoch is over; say whether it is. See [Note: the coordinator is away]."""
        began_s = time.monotonic()
        until_s = began_s + timeout_s
        while not self._ended.wait(FREE_EVERY_S):
            now_s = time.monotonic()
            if self.is_away and now_s < began_s + AWAY_S:
                until_s = now_s + timeout_s
            if now_s >= until_s or self._is_lost:
                return self._ended.is_set()
        return True

    def check_lease(self) -> None:
        """End this process if its host may have been dropped: [Note: leases]."""
        lease = self._lease
        if lease is None or not lease.is_leased or lease.left_s() > 0:
            return
        time.sleep(0.01)
        if lease.left_s() > 0:  # it was being written
            return
        text = "paceline: this host has lost the coordinator, and its lease is over: rank ends\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, kind: str, **facts: Any) -> None:
        try:
            with self._lock:
                send(self._pipe, kind, **facts)
        except OSError:
            raise MembershipError(_LAUNCHER_GONE) from None

    # --- SIGTERM: [Note: told to end] -------------------------------------------------------------
    def _catch_sigterm(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._handler = self._on_sigterm
            signal.signal(signal.SIGTERM, self._handler)

    def _on_sigterm(self, *_: object) -> None:
        self._is_told_to_end = True
        if self._is_lost:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"t")

    def _stop_catching(self) -> None:
        if self._handler is not None and signal.getsignal(signal.SIGTERM) == self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # --- the listening thread ---------------------------------------------------------------------
    def _listen(self) -> None:
        try:
            while not self._is_closed:
                ready = wait([self._pipe, self._wake_r], self._until_lease_s())
                self.check_lease()
                if self._wake_r in ready and b"t" in os.read(self._wake_r, 64):
                    self._say("leave")
                if self._pipe in ready:
                    self._hear(receive(self._pipe))
        except (EOFError, OSError):
            pass
        except MembershipError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception(
                "what the launcher said makes no sense, and is the last that was heard"
            )
        self._is_lost = True
        self._decisions.put(None)
        if self._is_told_to_end and not self._is_closed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _until_lease_s(self) -> float | None:
        if self._lease is None or not self._lease.is_leased:
            return None
        return min(max(0.0, self._lease.left_s()), 1.0)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "regroup":
            self.is_regrouping = True
        elif message["kind"] == "ping":
            self._say("pong")
        elif message["kind"] in ("away", "back"):
            self.is_away = message["kind"] == "away"
        elif message["kind"] == "end":
            end = partial(self._end, int(message["after"]), self._ended, self._left)
            threading.Thread(target=end, name="paceline-free", daemon=True).start()
        else:
            if message["kind"] == "begin":
                self._begin()
            self._decisions.put(message)

    def _end(self, after: int, ended: threading.Event, left: threading.Event) -> None:
        while self._committed() < after and not left.is_set():
            time.sleep(0.002)
        ended.set()
        while self._free_unless(left):
            left.wait(FREE_EVERY_S)

    def _free_unless(self, left: threading.Event) -> bool:
        with self._free_lock:
            is_in = not left.is_set()
            if is_in:
                self.ended_s = self.ended_s or time.monotonic()
                self._free()
        return is_in

    def close(self) -> None:
        """End the conversation."""
        self._is_closed = True
        with self._free_lock:
            self._left.set()
        self._stop_catching()
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"c")
        self._thread.join()
        self._pipe.close()
        if self._lease is not None:
            self._lease.close()
        os.close(self._wake_r)
        os.close(self._wake_w)


def _reach_launcher(directory: Path) -> Connection:
    """Connect to the launcher. It may stand still for some time, as long as it is there."""
    until_s = time.monotonic() + AWAY_S
    while directory.exists():
        try:
            return connect(socket_path(directory), read_key(key_path(directory)))
        except (ConnectionRefusedError, FileNotFoundError):
            break
        except (OSError, EOFError):
            if time.monotonic() >= until_s:
                raise MembershipError(
                    f"the launcher of this host has let nobody in for {AWAY_S:g} s"
                ) from None
            time.sleep(FREE_EVERY_S)
    raise MembershipError(_LAUNCHER_GONE)


def _checked(decision: dict[str, Any]) -> dict[str, Any]:
    """Raise if the job has failed, and nobody ends its ranks."""
    if decision["kind"] == "failed":
        raise MembershipError(str(decision["why"]))
    return decision
