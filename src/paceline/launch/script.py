"""The inside of a rank of ``paceline run``: a script as ``__main__``, as ``python script.py`` is.

Runs in a child of the fork server, at the bottom of its stack. The interpreter ends in its usual
way: threads, ``atexit``, finalizers. If an exception ends the script, the launcher is told over the
pipe, with the traceback: it goes into the log, and onto the terminal once. Who is killed or calls
``os._exit`` says nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from types import CodeType, ModuleType, TracebackType
from typing import Any

from paceline.errors import CollectiveTimeoutError, PacelineError, PeerFailedError, PeerLostError
from paceline.exit_reason import exit_reason_of, note_exception
from paceline.launch.kernel import set_process_name
from paceline.launch.target import Target, TargetKind

_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
_BLAMES = (PeerLostError, PeerFailedError, CollectiveTimeoutError)
_MAX_TRACEBACK = 60_000  # characters


@dataclass(frozen=True)
class Raised:
    """The exception that ended a rank, in its own words.

    Attributes:
        text: Type, message and place: ``ValueError: no such layer (train.py:12, in step)``.
        lost_pid: The process whose loss is the reason, if it is; else 0.
        lost_rank: The rank that is the reason, if one is; else -1.
        at_ns: When, on the clock ``time.monotonic_ns``.
        traceback: As Python prints it, from the script on; empty for ``sys.exit``.
    """

    text: str
    lost_pid: int
    lost_rank: int
    at_ns: int
    traceback: str = ""


def run_rank(pipe: Connection, target: Target, rank: int, environ: Mapping[str, str]) -> int:
    """The whole life of a rank; what the fork server's child runs. Returns the exit code.

    Args:
        pipe: To the launcher.
        target: What to run.
        rank: Its number.
        environ: The whole environment.
    """
    os.environ.clear()  # torch has added to it while it was imported
    os.environ.update(environ)
    set_process_name(f"rank{rank}:{os.path.basename(target.name)}")
    if target.kind is TargetKind.COMMAND:
        os.execvp(target.name, [target.name, *target.args])
    sys.orig_argv = [sys.executable, "-u", *target.words]
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=False)  # a crash says in which line: see local_ranks.py
    reporter = _ErrorReporter(pipe)
    sys.excepthook = reporter.last_hook
    try:
        exec(*_prepare(target))
    except SystemExit as error:
        note_exception(error)  # before its frames go, and the wrapper in them: peers are told why
        if error.code not in (None, 0):
            reporter.report(error)
        raise
    except BaseException as error:
        error = error.with_traceback(_below_us(error.__traceback__))
        reporter.report(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


class _ErrorReporter:
    """Tells the launcher of the exception that ends this rank; a fork of the rank is not a rank."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._pid = os.getpid()
        self._reported = 0  # the exception's id: a reference would keep the script's objects

    def report(self, error: BaseException) -> None:
        """Say it, if this is the rank's own process."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # the launcher is gone
                self._pipe.send_bytes(json.dumps(asdict(_raised(error))).encode())
                self._reported = id(error)

    def last_hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The hook below those of the script and of torch: the launcher prints what it was told."""
        if id(error) != self._reported or os.getpid() != self._pid:
            sys.__excepthook__(kind, error, trace)


def _prepare(target: Target) -> tuple[CodeType, dict[str, object]]:
    """Set up ``sys`` as for this target; return its code and the names of its ``__main__``."""
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    load = _load_module if target.kind is TargetKind.MODULE else _load_script
    code = load(target, main)
    sys.modules["__main__"] = main
    return code, main.__dict__


def _load_script(target: Target, main: ModuleType) -> CodeType:
    path = os.path.abspath(target.name)
    sys.argv = [target.name, *target.args]
    sys.path.insert(0, os.path.dirname(os.path.realpath(target.name)))
    main.__dict__.update(__file__=path, __cached__=None, __spec__=None, __package__=None)
    main.__loader__ = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _load_module(target: Target, main: ModuleType) -> CodeType:
    sys.path.insert(0, os.getcwd())
    sys.argv = ["-m", *target.args]
    spec = importlib.util.find_spec(target.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target.name}.__main__")
    loader: Any = spec.loader if spec is not None else None
    if spec is None or not hasattr(loader, "get_code"):
        raise ImportError(f"No module named {target.name} that can be run")
    code = loader.get_code(spec.name)
    sys.argv[0] = spec.origin or target.name
    main.__dict__.update(__file__=spec.origin, __cached__=spec.cached, __package__=spec.parent)
    main.__spec__, main.__loader__ = spec, loader
    assert isinstance(code, CodeType)
    return code


def _below_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _raised(error: BaseException) -> Raised:
    at_ns = time.monotonic_ns()
    reason = exit_reason_of(error)
    blamed = next((each for each in _causes(error) if isinstance(each, _BLAMES)), None)
    rank = blamed.rank if isinstance(blamed, PacelineError) else None
    printed = "" if isinstance(error, SystemExit) else _printed(error)
    return Raised(reason.text, reason.lost_pid, -1 if rank is None else rank, at_ns, printed)


def _printed(error: BaseException) -> str:
    """As Python prints it; of very long ones begin and end."""
    text = "".join(traceback.format_exception(error))
    if len(text) <= _MAX_TRACEBACK:
        return text
    half = _MAX_TRACEBACK // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def read_raised(pipe: Connection) -> Raised | None:
    """In the launcher: what a rank has said, if it has said something. Does not wait."""
    with contextlib.suppress(EOFError, OSError, ValueError, TypeError):
        if pipe.poll():
            return Raised(**json.loads(pipe.recv_bytes()))
    return None
