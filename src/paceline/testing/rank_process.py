"""The inside of one rank of ``run_ranks``: what happens in the child process.

Started by :mod:`paceline.testing.ranks` in a child of the fork server, which has imported this
module (and with it torch) already. Knows nothing about the other ranks or the deadline.

The conversation over the pipe is short. The rank sends one message, :class:`Returned` or
:class:`FunctionRaised`. After the latter it exits at once: its peers see a closed connection
instead of waiting. After `Returned` it waits until the caller closes the pipe, which means that
every rank has returned: a group that is torn down earlier can fail a peer's last collective.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.exit_reason import note_exception
from paceline.launch.exits import flush, leave
from paceline.launch.stacks import StackFile
from paceline.testing.payload import pack, unpack_call

WarningFilter = tuple[str, str, type[Warning], str, int]


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank needs to know.

    Attributes:
        rank: Its own number.
        world: How many there are.
        directory: A private directory of this call, for `work`, the rendezvous and notes.
        cwd: The working directory.
        environ: The whole environment; the fork server's own may be of another time.
        main: Of the caller's main module and path, as multiprocessing tells its children.
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
    main: dict[str, Any]
    warning_filters: Sequence[WarningFilter]
    backend: str | None
    timeout_s: float
    threads: int

    @property
    def work(self) -> Path:
        """The file with `fn` and its arguments, packed; one for all ranks."""
        return self.directory / "work"

    @property
    def notes(self) -> StackFile:
        """The file that this rank's stacks and last words are written to."""
        return StackFile(self.directory / f"rank{self.rank}.txt")


@dataclass(frozen=True)
class Returned:
    """`fn` returned; the value is packed."""

    value: bytes


@dataclass(frozen=True)
class FunctionRaised:
    """`fn`, or the set-up before it, raised."""

    summary: str
    traceback: str


def rank_main(pipe: Connection, spec: RankSpec) -> None:
    """Run one rank from start to end. What the child process does."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    with spec.notes.write_on_signal() as notes:
        report = _run(spec)
        flush()
        _send(pipe, report)
        if isinstance(report, FunctionRaised):
            os._exit(1)
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()
        leave(_shut_down(notes))


def _run(spec: RankSpec) -> Returned | FunctionRaised:
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
        return FunctionRaised(
            summary, "".join(traceback.format_exception(type(error), error, below_us))
        )


def _adopt_surroundings(spec: RankSpec) -> None:
    os.environ.clear()
    os.environ.update(spec.environ)
    os.chdir(spec.cwd)
    _import_main(spec)
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


def _import_main(spec: RankSpec) -> None:
    """Import the caller's script under another name, as multiprocessing does in its children."""
    process: Any = multiprocessing.current_process()
    process.name = f"rank {spec.rank}"
    process._inheriting = True  # seen by who would start ranks without end
    try:
        spawn.prepare(spec.main)
    finally:
        del process._inheriting


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


def _send(pipe: Connection, report: Returned | FunctionRaised) -> None:
    # Nobody to tell is no error: then the caller is gone, and so are we in a moment.
    with contextlib.suppress(OSError):
        pipe.send_bytes(pack(report, "a report"))


def _shut_down(notes: Any) -> int:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc(file=notes)
        notes.flush()
        return 1
    return 0
