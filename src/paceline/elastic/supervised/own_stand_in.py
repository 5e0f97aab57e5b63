"""A rank of torchrun or ``mp.spawn`` leaves its process to a stand-in, by itself.

Both end all ranks as soon as a process that they have started ends badly, so that process must not
be the rank. Called when ``init_process_group()`` looks for its store: the process forks, the child
goes on as the rank, and the parent becomes :mod:`paceline.elastic.stand_in` by ``exec``.
``autoload.py`` imports this in every process that imports torch: it must stay cheap.

[Note: when a rank forks]
- Its script has asked for elastic training: ``@elastic.run`` has decorated a function, or the main
  module has imported something of ``paceline.elastic``.
- torchrun or ``torch.multiprocessing`` has started it, with other ranks, all on this host. Not
  ``paceline run``, and it has no stand-in yet.
- Nothing is there that a child would not have or must not share: no second thread (native ones
  count, but those that their library ends at a fork), no process group, no CUDA driver. Otherwise
  a log line says what was there.
- ``PACELINE_STAND_IN`` is not 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from paceline.torch_private.rendezvous import Handler, Meeting

SWITCH = "PACELINE_STAND_IN"
"""The environment variable: 0 leaves ranks where their launcher has started them."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"
# The function that calls the script in a rank of mp.spawn, and of paceline run.
_OF_SPAWN = str(Path("torch", "multiprocessing", "spawn.py")), "_wrap"
_OF_RUN = str(Path("paceline", "launch", "script.py")), "run_rank"
_FORK = "--multiprocessing-fork"  # in the command line of what multiprocessing spawns
_PACKAGE = "paceline.elastic"
_ROOT = str(Path(__file__).parents[3])
_TOO_LATE = (
    "%s ends all ranks when one dies, also those that could go on: this rank could not leave its "
    "process to a stand-in, because %s. Start it with `-m paceline.elastic.stand_in` under "
    "torchrun, or call init_process_group() before anything else, in a script that imports "
    "paceline.elastic"
)
_is_asked = False
_why_not = "its script had not asked for elastic training when it called init_process_group()"


def ask_for_stand_in() -> None:
    """The script decorates a function with ``@elastic.run``."""
    global _is_asked
    _is_asked = True


def watch_rendezvous() -> None:
    """Have this process look at itself when it makes its group, if it may be a rank."""
    if _TORCHRUN in os.environ or _FORK in sys.orig_argv:
        from paceline.torch_private.rendezvous import replace_handlers

        replace_handlers(_forking)


def _forking(theirs: Handler) -> Handler:
    def meet(url: str, **options: Any) -> Iterator[Meeting]:
        from paceline.torch_private.rendezvous import query_of

        leave_to_stand_in(int(query_of(url).get("world_size", os.environ.get("WORLD_SIZE", "1"))))
        yield from theirs(url, **options)

    return meet


def leave_to_stand_in(world: int) -> None:
    """Go on in a child, if this process is a rank that should: [Note: when a rank forks]."""
    global _why_not
    if world < 2 or not (_is_asked or _imports_elastic()) or not _launcher():
        return
    _why_not = _what_is_in_the_way()
    if not _why_not:
        _fork()


def warn_without_stand_in() -> None:
    """Say so, where a launcher will end the survivors of a rank."""
    launcher = _launcher()
    if launcher:
        logging.getLogger(_PACKAGE).warning(_TOO_LATE, launcher, _why_not)


def _launcher() -> str:
    """Who has started this rank and would end all; empty: nobody, or it has a stand-in."""
    from paceline.elastic.supervised.outcome import STAND_IN

    if STAND_IN in os.environ or os.environ.get(SWITCH) == "0" or _is_called_by(_OF_RUN):
        return ""
    if _is_of_multiprocessing():  # of whatever is above, this one has started the process
        return "mp.spawn with join" if _is_called_by(_OF_SPAWN) else ""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return ""  # nobody could fence a rank of another host
    return "torchrun" if _TORCHRUN in os.environ else ""


def _is_of_multiprocessing() -> bool:
    # Who has not imported it was not started by it.
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _is_called_by(which: tuple[str, str]) -> bool:
    file, name = which
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def _imports_elastic() -> bool:
    found: list[Any] = []
    for name in ("__main__", "__mp_main__"):
        found += vars(sys.modules[name]).values() if name in sys.modules else []
    return any(_is_elastic(each) for each in found)


def _is_elastic(value: Any) -> bool:
    if isinstance(value, type(sys)):
        return value.__name__.startswith(_PACKAGE)
    of = getattr(value, "__module__", None)
    return isinstance(of, str) and of.startswith(_PACKAGE)


def _what_is_in_the_way() -> str:
    """What a child could not have; empty if nothing is."""
    import torch.distributed as dist

    if dist.is_initialized():
        return "it had a process group already"
    if threading.current_thread() is not threading.main_thread():
        return "init_process_group() was called in another thread than the main one"
    try:
        threads = _count_threads()
        has_cuda = "libcuda.so" in Path("/proc/self/maps").read_text()
    except OSError:
        return "/proc cannot be read"
    if threads > 1:
        return f"its process had {threads} threads already"
    if has_cuda:
        return "the CUDA driver was loaded already"
    return "" if sys.executable else "nobody knows where Python is"


def _count_threads() -> int:
    """How many threads a fork would leave behind."""
    found = len(os.listdir("/proc/self/task"))
    if found > 1:  # numpy's BLAS has some from its import on, which it ends whenever one forks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        found = len(os.listdir("/proc/self/task"))
    return found


def _fork() -> None:
    """Go on in a child; this process becomes its stand-in."""
    import socket

    from paceline.elastic.supervised.outcome import STAND_IN
    from paceline.launch.kernel import die_with_parent

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stand_in = os.getpid()
    drawn = random.getstate()  # Python seeds it anew in a child
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    rank = os.fork()
    if rank:
        _become_stand_in(rank, ours.fileno())
    os.setpgid(0, 0)
    die_with_parent(stand_in)
    random.setstate(drawn)
    ours.close()
    os.environ[STAND_IN] = f"{stand_in}:{theirs.detach()}"


def _become_stand_in(rank: int, socket: int) -> None:
    """Does not return. Nothing of this program is left: no descriptor, no handler, no memory."""
    from paceline.elastic import stand_in

    try:
        os.set_inheritable(socket, True)
        words = ["-m", stand_in.__name__, stand_in.ADOPT, str(rank), str(socket)]
        os.execve(sys.executable, [sys.executable, *words], _environ(os.environ))
    finally:
        os._exit(1)  # the kernel kills the rank


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join([_ROOT, *paths])}
