"""The inside of one rank of ``run_ranks``: what happens in the child process.

Started by :mod:`paceline.testing.ranks` from the forkserver, which has imported this module (and
with it torch) already. Knows nothing about the other ranks or the deadline.

The conversation over the pipe is short. The rank sends one message, :class:`Returned` or
:class:`Raised`. After `Raised` it exits at once, so that its peers see a closed connection instead
of waiting. After `Returned` it waits until the caller closes the pipe, which means that every rank
has returned: a group that is torn down earlier can fail a peer's last collective.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.exit_reason import note_exception
from paceline.testing.payload import pack, unpack_call

try:
    import fcntl
except ImportError:  # pragma: no cover - not a POSIX system
    fcntl = None  # type: ignore[assignment]

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads to its notes file."""

WarningFilter = tuple[str, str, type[Warning], str, int]


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank needs to know.

    Attributes:
        rank: Its own number.
        world: How many there are.
        directory: A private directory of this call, for `work`, the rendezvous and notes.
        cwd: The working directory.
        environ: The whole environment; the forkserver's own may be of another time.
        warning_filters: The caller's, as arguments of ``warnings.filterwarnings``.
        backend: Of the process group; None if `fn` wants to make its own.
        timeout_s: The caller's deadline.
        threads: Intra-op threads.
    """

    rank: int
    world: int
    directory: Path
    cwd: str
    environ: Mapping[str, str]
    warning_filters: Sequence[WarningFilter]
    backend: str | None
    timeout_s: float
    threads: int

    @property
    def work(self) -> Path:
        """The file with `fn` and its arguments, packed; one for all ranks."""
        return self.directory / "work"

    @property
    def notes(self) -> Path:
        """The file that this rank's stacks and last words are written to."""
        return self.directory / f"rank{self.rank}.txt"


@dataclass(frozen=True)
class Returned:
    """`fn` returned; the value is packed."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """`fn`, or the set-up before it, raised."""

    summary: str
    traceback: str


def rank_main(spec: RankSpec, pipe: Connection, streams: Sequence[Connection | None]) -> None:
    """Run one rank from start to end. The target of the child process."""
    _die_with_caller()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets Ctrl-C too, and kills
    _take_over(streams)
    with spec.notes.open("w") as notes:
        faulthandler.register(STACK_SIGNAL, file=notes, all_threads=True)
        report = _run(spec)
        _flush()
        _send(pipe, report)
        if isinstance(report, Raised):
            os._exit(1)
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()
        _shut_down(notes)
        faulthandler.unregister(STACK_SIGNAL)


def _run(spec: RankSpec) -> Returned | Raised:
    try:
        _adopt_surroundings(spec)
        fn, args = unpack_call(spec.work.read_bytes())
        if spec.backend is not None:
            _init_group(spec, spec.backend)
        return Returned(pack(fn(*args), "the result of fn"))
    except BaseException as error:
        # SystemExit and KeyboardInterrupt too: whatever it was, it was not a return.
        note_exception(error)
        summary = "".join(traceback.format_exception_only(error)).strip()
        below_us = error.__traceback__ and error.__traceback__.tb_next
        return Raised(summary, "".join(traceback.format_exception(type(error), error, below_us)))


def _adopt_surroundings(spec: RankSpec) -> None:
    os.environ.clear()
    os.environ.update(spec.environ)
    os.chdir(spec.cwd)
    warnings.resetwarnings()
    for action, message, category, module, line in spec.warning_filters:
        warnings.filterwarnings(
            action,  # type: ignore[arg-type]
            message=message,
            category=category,
            module=module,
            lineno=line,
            append=True,
        )
    torch.set_num_threads(spec.threads)


def _init_group(spec: RankSpec, backend: str) -> None:
    # A file in a private directory: no port that another process may take or connect to.
    store = dist.FileStore(str(spec.directory / "store"), spec.world)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=spec.rank,
        world_size=spec.world,
        timeout=datetime.timedelta(seconds=spec.timeout_s),
    )
    # No rank runs fn before all are connected: one that fails at once would take down the set-up of
    # its peers, and they would report that instead of what they do. Over the store and not by a
    # barrier, because then the same could happen to the barrier.
    store.set(f"connected/{spec.rank}", "")
    store.wait([f"connected/{rank}" for rank in range(spec.world)])


def _send(pipe: Connection, report: Returned | Raised) -> None:
    # Nobody to tell is no error: then the caller is gone, and so are we in a moment.
    with contextlib.suppress(OSError):
        pipe.send_bytes(pack(report, "a report"))


def _shut_down(notes: Any) -> None:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc(file=notes)
        raise
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _take_over(streams: Sequence[Connection | None]) -> None:
    """Write to the caller's stdout and stderr of now, not to those the forkserver began with."""
    for number, stream in zip((1, 2), streams, strict=True):
        if stream is not None:
            os.dup2(stream.fileno(), number)
            stream.close()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)


def _die_with_caller() -> None:
    """Make the kernel kill this process when the caller ends, however it ends.

    The forkserver is the parent, and it lives as long as any rank does, so PR_SET_PDEATHSIG would
    watch the wrong process. The caller holds the other end of a pipe that nobody writes to; the
    kernel sends a signal of our choice when that end closes, even if this process is stopped or
    stuck in C. Where that does not exist, a thread does the same for all but those two cases.
    """
    caller = parent_process()
    assert caller is not None
    sentinel = caller.sentinel
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
        if select.select([sentinel], [], [], 0)[0]:
            os._exit(1)
    else:

        def watch() -> None:
            select.select([sentinel], [], [])
            os._exit(1)

        threading.Thread(target=watch, name="paceline-caller-watch", daemon=True).start()
