"""``paceline run``'s loop: starts the ranks of this host, watches them, ends them, says who failed.

Called by ``cli/run.py``. One thread, one selector. Decides when a job is over and what its exit
status is; ranks are in ``local_ranks.py``, other hosts in ``rendezvous.py``, who failed first in
``failure.py``. Must not import torch: the fork server has it.
"""

from __future__ import annotations

import contextlib
import json
import select
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from paceline.errors import ConfigurationError
from paceline.launch import shutdown
from paceline.launch.child import Child
from paceline.launch.descriptors import descriptors_for
from paceline.launch.environment import job_environ, places, rank_environ
from paceline.launch.exits import exit_summary
from paceline.launch.failure import Failure, find_failure
from paceline.launch.fork_server import TORCH, ForkServer
from paceline.launch.kernel import orphans_ended
from paceline.launch.local_ranks import LocalRank, error_file, rank_streams
from paceline.launch.memory_events import oom_kills
from paceline.launch.output import LogFile, RankStream
from paceline.launch.rendezvous import Endpoint, HostEnded, JobHosts, keep_store
from paceline.launch.screen import Screen
from paceline.launch.signals import HANDLED, signals_heard
from paceline.launch.target import Target
from paceline.observe.launched import LaunchedFile
from paceline.observe.private_file import write_whole
from paceline.observe.run_folder import RunFolder

AFTER_FAILURE_S = 3.0
"""How long the other ranks may go on after one has failed."""
_EXIT_BARRIER_S = 300.0  # host 0 has the store: it waits for the others, as torchrun does
_TOLD_S = 10.0  # for the store to have what this host says at its end
_OTHER_HOSTS_S = 5.0  # to hear from the host that failed first
_LEFT_S = 0.5  # for what ranks have left behind, when the ranks have used up their time


@dataclass(frozen=True)
class JobPlan:
    """What to run and how.

    Attributes:
        target: The script.
        hosts: How many hosts and ranks.
        run_id: Names the job; the same on all hosts.
        options: Environment variables for all ranks.
        shown: Local ranks whose output is shown; None shows all.
        shutdown_s: From the first signal to SIGKILL.
    """

    target: Target
    hosts: JobHosts
    run_id: str
    options: Mapping[str, str] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    shutdown_s: float = 3.0


class Job:
    """The ranks of this host, from start to end. Made once, run once."""

    preload: tuple[str, ...] = (
        *TORCH,
        "paceline.launch.script",
        "paceline.launch.rendezvous",
        "paceline.ddp",
    )
    on_sigterm = staticmethod(shutdown.on_terminate)
    """What it means to the ranks."""

    def __init__(self, plan: JobPlan, folder: RunFolder, screen: Screen) -> None:
        self._plan = plan
        self._folder = folder
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._ranks: list[LocalRank] = []
        self._launched = LaunchedFile(folder, plan.hosts.number)
        self._store: Child | None = None
        self._shutdown = shutdown.Shutdown()
        self._signals: list[int] = []  # that the launcher has got
        self._signalled_ns = 0  # when, for the first
        self._hosts_ended: dict[int, HostEnded] = {}
        self._oom_kills = oom_kills()

    def run(self) -> int:
        """Run it and return the exit status.

        Raises:
            ConfigurationError: It cannot be started, for a reason that the user can change.
            ForkServerError: An import in the fork server failed, or it got no process.
        """
        ranks, run_dir = self._plan.hosts.local_world, str(self._folder.path.absolute())
        self._environ = job_environ(ranks, run_dir, self._plan.options)
        with (
            contextlib.closing(self._selector),
            signals_heard() as self._signal_end,
            orphans_ended(),  # if the fork server is killed: it does that else
            self._served() as self._server,
            contextlib.ExitStack() as stack,
        ):
            stack.enter_context(descriptors_for(ranks))  # of the launcher alone: ranks are forked
            stack.callback(self._close)
            reader = self._signal_end
            self._screen.is_urgent = lambda: bool(self._signals) or _has_more(reader)
            stack.callback(setattr, self._screen, "is_urgent", bool)  # nobody hears signals then
            self._selector.register(reader, selectors.EVENT_READ, lambda: self._on_signals(reader))
            self._start_store()
            while not self._is_over():
                self._wait_once()
            return self._conclude()

    @contextlib.contextmanager
    def _served(self) -> Iterator[ForkServer]:
        server = ForkServer(self.preload, environ=self._environ, flags=["-u"])
        try:
            yield server
        finally:
            server.close(self._is_in_a_hurry)

    def _is_in_a_hurry(self) -> bool:
        """Asked while the fork server ends what ranks have left behind: whether to kill it now."""
        with contextlib.suppress(BlockingIOError):
            self._on_signals(self._signal_end)
        if not self._signals:
            return False
        since_s = (time.monotonic_ns() - self._signalled_ns) / 1e9
        return len(self._signals) > 1 or since_s > self._plan.shutdown_s + _LEFT_S

    # --- the loop --------------------------------------------------------------------------------

    def _wait_once(self, limit_s: float | None = None) -> None:
        waits = [self._screen.until_next_s(), self._shutdown.until_next_s(), limit_s]
        waits += [rank.until_lingering_s() for rank in self._ranks]
        timeout_s = min((wait for wait in waits if wait is not None), default=None)
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) == key:
                key.data()
        for timed in self._shutdown.take_due():
            for rank in self._ranks:
                rank.send(timed, by_launcher=not self._signals)
        for rank in self._ranks:
            if rank.until_lingering_s() == 0.0:
                self._say_lingering(rank)
        self._screen.tick()

    def _is_over(self) -> bool:
        if self._ranks:
            return all(rank.child.exit_code is not None for rank in self._ranks)
        return bool(self._signals)  # nothing has been started yet

    def _on_signals(self, reader: socket.socket) -> None:
        for number in reader.recv(64):
            if number not in HANDLED:
                continue
            self._signals.append(number)
            self._signalled_ns = self._signalled_ns or time.monotonic_ns()
            limit_s = self._plan.shutdown_s
            if len(self._signals) > 1:
                self._shutdown.begin(shutdown.AT_ONCE)
            elif number == signal.SIGINT:
                self._screen.say("\npaceline run: interrupted; once more to kill at once\n")
                self._shutdown.begin(shutdown.on_interrupt(limit_s))
            elif number == signal.SIGTERM:
                self._shutdown.begin(self.on_sigterm(limit_s))
            else:
                self._shutdown.begin(shutdown.on_terminate(limit_s))

    # --- the store and other hosts ---------------------------------------------------------------

    def _start_store(self) -> None:
        self._store = child = self._server.fork()
        child.run(keep_store, self._plan.hosts)
        self._selector.register(child.pipe, selectors.EVENT_READ, lambda: self._hear_store(child))
        self._selector.register(
            child.sentinel, selectors.EVENT_READ, lambda: self._watch_store(child)
        )

    def _watch_store(self, child: Child) -> None:
        child.wait_started()
        if child.wait(0.0) is not None:
            self._selector.unregister(child.sentinel)

    def _hear_store(self, child: Child) -> None:
        try:
            words = json.loads(child.pipe.recv_bytes())
        except (EOFError, OSError):
            self._selector.unregister(child.pipe)
            child.wait_started()
            code = child.wait()
            if not self._ranks:
                raise ConfigurationError(f"the store has {exit_summary(code or 0)}") from None
            self._screen.say(f"paceline run: the job's store has {exit_summary(code or 0)}\n")
            return
        if "error" in words:
            raise ConfigurationError(words["error"])
        if "waiting" in words:
            self._warn(words["waiting"])
            return
        if "worlds" in words:
            hosts = replace(self._plan.hosts, number=words["number"])  # the store may have given it
            self._plan = replace(self._plan, hosts=hosts)
            self._launched = LaunchedFile(self._folder, hosts.number)
            self._start_ranks(words["worlds"], words["port"])
        else:
            self._hear_host(HostEnded(**words))

    def _hear_host(self, ended: HostEnded) -> None:
        self._hosts_ended[ended.host] = ended
        if ended.code and ended.host != self._plan.hosts.number:
            self._shutdown.begin(shutdown.on_failure(AFTER_FAILURE_S, self._plan.shutdown_s))

    # --- ranks -----------------------------------------------------------------------------------

    def _start_ranks(self, worlds: list[int], port: int) -> None:
        plan = self._plan
        store = Endpoint(plan.hosts.endpoint.host, port)
        for place in places(worlds, plan.hosts.number):
            log = LogFile(self._folder.log(place.rank), self._warn)
            is_shown = plan.shown is None or place.local_rank in plan.shown
            show = self._screen.show_lines if place.rank else self._screen.show
            streams = rank_streams(log, show if is_shown else None, place.rank)
            errors = error_file(str(self._folder.path.absolute()), place.rank)
            environ = self._environ | rank_environ(place, store, plan.run_id, errors)
            rank = LocalRank.start(self._server, place, plan.target, environ, log, streams)
            self._ranks.append(rank)
            self._watch(rank)

    def _watch(self, rank: LocalRank) -> None:
        for stream in rank.streams:
            self._selector.register(stream, selectors.EVENT_READ, partial(self._pump, stream))
        self._selector.register(
            rank.child.sentinel, selectors.EVENT_READ, lambda: self._on_rank(rank)
        )
        self._selector.register(
            rank.child.pipe, selectors.EVENT_READ, lambda: self._hear_rank(rank)
        )

    def _hear_rank(self, rank: LocalRank) -> None:
        """What ended it, or that it says nothing: there is one message at most."""
        self._selector.unregister(rank.child.pipe)
        rank.hear_words()

    def _say_lingering(self, rank: LocalRank) -> None:
        """A traceback is shown with the rank's end; if that does not come, it is shown now."""
        rank.log_traceback()
        if rank.raised is not None:
            text = "has raised this, and has not ended: it may wait for its threads"
            self._warn(f"rank {rank.place.rank} {text}\n{rank.raised.traceback.rstrip()}")

    def _pump(self, stream: RankStream) -> None:
        if not stream.pump():
            self._selector.unregister(stream)

    def _on_rank(self, rank: LocalRank) -> None:
        if not rank.hear():
            self._launched.note(rank.place.rank, rank.child.pid, len(self._ranks))
            return
        self._selector.unregister(rank.child.sentinel)
        for descriptor in (*(stream.fileno() for stream in rank.streams), rank.child.pipe.fileno()):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        rank.finish(self._oom_kills)
        self._on_ended(rank)

    def _on_ended(self, rank: LocalRank) -> None:
        if rank.child.exit_code and not self._shutdown.has_begun:
            self._shutdown.begin(shutdown.on_failure(AFTER_FAILURE_S, self._plan.shutdown_s))

    # --- the end ---------------------------------------------------------------------------------

    def _conclude(self) -> int:
        """All ranks have ended, or none was started."""
        failure = find_failure([rank.end(self._folder) for rank in self._ranks])
        if self._signals and (failure is None or failure.culprit.failed_ns > self._signalled_ns):
            code = 128 + self._signals[0]
            self._tell_hosts(HostEnded(self._plan.hosts.number, code, "interrupted", True))
            return code
        code = 0 if failure is None else failure.exit_status
        headline = "" if failure is None else failure.headline()
        is_consequence = failure is not None and failure.culprit.looks_like_a_victim
        ended = HostEnded(self._plan.hosts.number, code, headline, is_consequence)
        self._tell_hosts(ended)
        self._wait_for_hosts(ended)
        return self._report(failure, ended)

    def _tell_hosts(self, ended: HostEnded) -> None:
        if self._store is not None and self._plan.hosts.count > 1:
            with contextlib.suppress(OSError):
                self._store.pipe.send_bytes(json.dumps(asdict(ended)).encode())

    def _wait_for_hosts(self, ended: HostEnded) -> None:
        """For the store's users, and for the host that failed first."""
        if self._plan.hosts.count == 1:
            return
        awaited = set(range(self._plan.hosts.count))
        limit_s = _OTHER_HOSTS_S if ended.code else _EXIT_BARRIER_S
        if self._plan.hosts.number != 0 and not ended.is_consequence:
            awaited, limit_s = {self._plan.hosts.number}, _TOLD_S  # the store has our message
        until_s = time.monotonic() + limit_s
        while not awaited <= self._hosts_ended.keys() and not self._signals:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            self._wait_once(left_s)

    def _report(self, failure: Failure | None, ended: HostEnded) -> int:
        elsewhere = [
            e
            for e in self._hosts_ended.values()
            if e.code and not e.is_consequence and e.host != ended.host
        ]
        if elsewhere and (failure is None or ended.is_consequence):
            first = elsewhere[0]
            text = f"paceline run: on host {first.host}, {first.headline}\n"
            if failure is not None:
                text += f"  because of that: {failure.headline()}\n"
            self._write_failure(text)
            return first.code
        if failure is not None:
            self._write_failure(failure.block())
        return ended.code

    def _write_failure(self, text: str) -> None:
        self._screen.say("\n" + text)
        try:
            write_whole(self._folder.failure, text)
        except OSError as error:
            self._warn(f"{self._folder.failure} cannot be written: {error.strerror}")

    def _warn(self, text: str) -> None:
        self._screen.say(f"paceline run: {text}\n")

    def _close(self) -> None:
        for rank in self._ranks:
            rank.close()
        if self._store is not None:
            self._store.close()


def _has_more(reader: socket.socket) -> bool:
    """Whether a signal has come that the loop has not heard of."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(0))
