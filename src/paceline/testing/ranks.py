"""``run_ranks``: run a function on real ranks, with a deadline, and leave nothing behind.

Called by tests (ours and users'), the demo and the benchmarks. Must not know anything about DDP: it
starts processes, listens to them, and tells what happened. What a rank does is in
:mod:`paceline.testing.rank_process`; how the caller keeps watch is in
:mod:`paceline.testing.supervise`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigurationError
from paceline.launch.fork_server import ForkServer, shared_fork_server
from paceline.testing.payload import pack_call, unpack
from paceline.testing.rank_process import RankSpec, WarningFilter, rank_main
from paceline.testing.supervise import RankHandle, supervise

T = TypeVar("T")

# Imported once, in the fork server.
_PRELOAD = ("paceline.testing.rank_process",)
# Slow to import, and ranks need them if the caller has them: test modules import them.
_PRELOAD_IF_LOADED = ("numpy", "pytest", "hypothesis", "cloudpickle")
# Of what multiprocessing tells its children: how to find the caller's modules.
_MAIN = {"sys_path", "sys_argv", "orig_dir", "init_main_from_name", "init_main_from_path"}


def run_ranks(
    n: int,
    fn: Callable[..., T],
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    backend: str = "gloo",
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    threads: int = 1,
) -> list[T]:
    """Call ``fn(*args)`` in ``n`` new processes and return what each returned, in rank order.

    In each rank the default process group is there (``dist.get_rank()`` works), on the loopback
    interface, and is destroyed after all ranks have returned. Ranks see the caller's environment,
    working directory, warning filters, stdout and stderr; and ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` as torchrun sets them.

    Args:
        n: How many ranks.
        fn: Importable, or, with cloudpickle installed, any function. A script that calls
            ``run_ranks`` does so under ``if __name__ == "__main__":``.
        args: Its arguments, the same for every rank.
        timeout_s: From when the ranks have started; at that moment all are killed.
        grace_s: How long the other ranks may go on after one has failed.
        backend: Of the process group.
        init: False: `fn` makes its own groups; ``PACELINE_TEST_INIT_METHOD`` is a ``file://``
            address that works as ``init_method``.
        env: Variables to set in the ranks, or with None to unset.
        threads: Intra-op threads for each rank.

    Raises:
        RanksFailedError: A rank raised, died, or was not done in time. The text has the traceback
            or the Python stack of every rank concerned.
        ConfigurationError: An argument is wrong, or something cannot be pickled.
    """
    _check(n, timeout_s, grace_s, threads)
    _check_script()
    work = pack_call(fn, args)
    call = f"run_ranks({n}, {getattr(fn, '__qualname__', repr(fn))})"
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name:
        directory = Path(name)  # only this user may enter it
        specs = [
            RankSpec(
                rank=rank,
                world=n,
                directory=directory,
                cwd=os.getcwd(),
                environ=_environ(rank, n, directory, env or {}),
                main=_main_module(),
                warning_filters=_warning_filters(),
                backend=backend if init else None,
                timeout_s=timeout_s,
                threads=threads,
            )
            for rank in range(n)
        ]
        # In a file: written once for all ranks.
        specs[0].work.write_bytes(work)
        with _started(specs) as handles:
            packed = supervise(call, handles, timeout_s=timeout_s, grace_s=grace_s)
    return [unpack(value) for value in packed]


def warm_up(modules: Sequence[str] = ()) -> None:
    """Start the fork server if there is none; it imports torch meanwhile, and this does not wait.

    Never needed: the first ``run_ranks`` does it. A program that has something else to do first
    saves that time.

    Args:
        modules: What it imports on top, so that no rank has to; in the environment of now.
    """
    _fork_server(modules)


@contextlib.contextmanager
def _started(specs: list[RankSpec]) -> Iterator[list[RankHandle]]:
    """Start all ranks; on the way out, in whatever way, kill those that run and wait for them."""
    server = _fork_server()
    handles: list[RankHandle] = []
    try:
        for spec in specs:
            handles.append(RankHandle(spec.rank, server.fork(may_fork=True), spec.notes))
            handles[-1].child.run(rank_main, spec)
        for handle in handles:
            handle.wait_started()
        yield handles
    finally:
        for handle in handles:
            handle.child.kill()
        for handle in handles:
            handle.close()


def _fork_server(more: Sequence[str] = ()) -> ForkServer:
    warm = [name for name in _PRELOAD_IF_LOADED if name in sys.modules]
    return shared_fork_server([*_PRELOAD, *warm, *more])


def _main_module() -> dict[str, Any]:
    found = spawn.get_preparation_data("")
    return {name: value for name, value in found.items() if name in _MAIN}


def _environ(
    rank: int, world: int, directory: Path, changes: Mapping[str, str | None]
) -> dict[str, str]:
    environ = dict(os.environ)
    for loopback in ("lo", "lo0"):
        if loopback in (name for _, name in socket.if_nameindex()):
            environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    environ["RANK"] = environ["LOCAL_RANK"] = str(rank)
    environ["WORLD_SIZE"] = environ["LOCAL_WORLD_SIZE"] = str(world)
    environ["PACELINE_TEST_INIT_METHOD"] = f"file://{directory / 'own_store'}"
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


def _warning_filters() -> list[WarningFilter]:
    """The caller's filters (under pytest: warnings are errors) in a form that can be replayed."""

    def text(pattern: re.Pattern[str] | str | None) -> str:
        if pattern is None:
            return ""
        return re.escape(pattern) + r"\Z" if isinstance(pattern, str) else pattern.pattern

    return [
        (action, text(message), category, text(module), line)
        for action, message, categories, module, line in warnings.filters
        for category in (categories if isinstance(categories, tuple) else (categories,))
    ]


def _check(n: int, timeout_s: float, grace_s: float, threads: int) -> None:
    if type(n) is not int or n < 1:
        raise ConfigurationError(f"run_ranks needs at least one rank, as an int; n is {n!r}")
    if timeout_s <= 0:
        raise ConfigurationError(f"timeout_s is in seconds and above 0, not {timeout_s!r}")
    if grace_s < 0:
        raise ConfigurationError(f"grace_s is in seconds and not below 0, not {grace_s!r}")
    if threads < 1:
        raise ConfigurationError(f"threads is at least 1, not {threads!r}")


def _check_script() -> None:
    """See that ranks can import what the caller was started with; Python has them do that first."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "run_ranks was called while a rank imports this script, and would start ranks without "
            "end. Call it under `if __name__ == '__main__':`."
        )
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is not None and os.path.basename(path) == "<stdin>":
        raise ConfigurationError(
            "The script comes from standard input, and each rank has to import it. Put it into a "
            "file and run that."
        )
