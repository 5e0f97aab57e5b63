"""How hosts of a job find each other, and the store that its ranks meet at.

One child of the fork server on each host (it needs torch) keeps the *job store*: a TCPStore, served
on host 0, reached by all others. Ranks use the same store (torchrun calls that the agent store), so
no rank has to be there for the others to meet. Afterwards the child passes on which hosts have
ended, until the launcher closes its pipe. JSON on the pipe, in both directions. Who waits long
says for which hosts.

Keys are ours alone (``paceline/…``); ranks' keys have torch's prefix. Every host sets

    paceline/host/<number>/claimed    a counter: the first that adds to it has that number
    paceline/host/<number>    how many ranks it has: when all are there, ranks are numbered
    paceline/ended/<number>   JSON, once: what became of its ranks
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

JOIN_S = 900.0
"""How long hosts wait for each other, as under torchrun."""
_LOOK_S = 0.5
_MEET_S = 0.05
_TELL_S = 10.0
"""After this long, and each time that it has doubled, the log says which hosts are missing."""
_PREFIX = "paceline"
UNNUMBERED = -1
"""The number of a host that gets one when it comes to the store."""


@dataclass(frozen=True)
class Endpoint:
    """Where the store is: host 0's name and port; port 0 is any free one."""

    host: str = "localhost"
    port: int = 0


@dataclass(frozen=True)
class JobHosts:
    """Which hosts there are, as one of them sees it before they have met.

    Attributes:
        count: How many hosts.
        number: This one's, or UNNUMBERED.
        local_world: Ranks on this host.
        endpoint: Of the store.
        minimum: Fewer hosts may do to begin with, if the job is elastic.
    """

    count: int
    number: int
    local_world: int
    endpoint: Endpoint
    minimum: int = 1

    @property
    def name(self) -> str:
        """This host, in messages."""
        return "this host" if self.number == UNNUMBERED else f"host {self.number}"


def is_local(host: str) -> bool:
    """Say whether a name or an address is this machine's: only on one's own can one listen."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def keep_store(pipe: Connection, hosts: JobHosts) -> int:
    """Serve or reach the store until the launcher closes its pipe. What the child runs."""
    try:
        store = _serve(hosts.endpoint, hosts.count) if hosts.number == 0 else _reach(hosts, pipe)
        hosts = _claim_number(store, hosts)
        worlds = _meet(store, hosts, pipe)
    except Exception as error:
        _say(pipe, {"error": _explain(error, hosts)})
        return 1
    _say(pipe, {"worlds": worlds, "port": store.port, "number": hosts.number})
    _relay(pipe, store, hosts)
    return 0


def _serve(endpoint: Endpoint, count: int) -> Any:
    import torch.distributed as dist

    # On one host nobody else needs to reach it.
    where = "127.0.0.1" if count == 1 else ""
    listener = socket.socket(socket.AF_INET if count == 1 else _family())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((where, endpoint.port))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=JOIN_S),
        master_listen_fd=listener.detach(),
    )


def _family() -> socket.AddressFamily:
    """IPv6 listens to IPv4 as well, where there is some."""
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


def _reach(hosts: JobHosts, pipe: Connection) -> Any:
    import torch.distributed as dist

    where = hosts.endpoint
    text = (
        f"{hosts.name} cannot reach host 0 at {where.host}:{where.port} yet: is paceline "
        "run started there, is that its address, and may this port be reached?"
    )
    timeout = datetime.timedelta(seconds=JOIN_S)
    with _told_of(pipe, lambda: text):
        return dist.TCPStore(where.host, where.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _told_of(pipe: Connection, text: Callable[[], str]) -> Iterator[None]:
    """Have the launcher say what the block waits for, if it waits for long."""
    is_over = threading.Event()

    def tell() -> None:
        began_s, wait_s = time.monotonic(), _TELL_S
        while not is_over.wait(wait_s):
            for_s = time.monotonic() - began_s
            _say(pipe, {"waiting": f"{text()} Waited {for_s:.0f} s of {JOIN_S:.0f} s"})
            wait_s = max(_TELL_S, for_s)

    thread = threading.Thread(target=tell, name="paceline-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _claim_number(store: Any, hosts: JobHosts) -> JobHosts:
    """Take the number that this host was given, or the lowest that nobody has."""
    is_given = hosts.number != UNNUMBERED
    for number in [hosts.number] if is_given else range(1, hosts.count):
        if store.add(f"{_PREFIX}/host/{number}/claimed", 1) == 1:
            return replace(hosts, number=number)
    if is_given:
        raise ValueError(f"two hosts have --node-rank {hosts.number}")
    raise ValueError(f"paceline run was started on more hosts than --nnodes {hosts.count} says")


def _meet(store: Any, hosts: JobHosts, pipe: Connection) -> list[int]:
    """How many ranks each host has."""
    store.set(f"{_PREFIX}/host/{hosts.number}", f"{hosts.local_world} {hosts.count}")
    found = _gather(store, hosts, pipe)
    if any(int(count) != hosts.count for _, count in found):
        raise ValueError(f"hosts disagree about --nnodes: {[int(count) for _, count in found]}")
    return [int(world) for world, _ in found]


def _gather(store: Any, hosts: JobHosts, pipe: Connection) -> list[list[str]]:
    """What each host has set; says which ones are missing."""
    missing = list(range(hosts.count))

    def text() -> str:
        where = f"port {store.port}" if hosts.number == 0 else f"{hosts.endpoint.host}:{store.port}"
        numbers = ", ".join(map(str, missing))
        return (
            f"host {hosts.number} waits at {where} for host{'s' * (len(missing) > 1)} {numbers} of "
            f"{hosts.count}: is paceline run started there, with that --node-rank or none?"
        )

    keys = [f"{_PREFIX}/host/{number}" for number in range(hosts.count)]
    until_s = time.monotonic() + JOIN_S
    with _told_of(pipe, text):
        while missing:
            missing[:] = [number for number in missing if not store.check([keys[number]])]
            if missing and time.monotonic() > until_s:
                raise RuntimeError(text())
            time.sleep(_MEET_S if missing else 0.0)
    return [store.get(key).decode().split() for key in keys]


def _explain(error: Exception, hosts: JobHosts) -> str:
    where = f"{hosts.endpoint.host}:{hosts.endpoint.port}"
    if isinstance(error, OSError) and hosts.number == 0:
        reason = os.strerror(error.errno or 0)
        remedy = "name another with --rdzv-endpoint HOST:PORT"
        if hosts.count == 1:
            remedy += ", or leave it out: any free one is taken then"
        return f"port {hosts.endpoint.port} cannot be used for the job's store: {reason}; {remedy}"
    if isinstance(error, ValueError):
        return str(error)
    return f"{hosts.name} did not meet the others at {where}: {error}"


def _say(pipe: Connection, words: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        pipe.send_bytes(json.dumps(words).encode())


@dataclass(frozen=True)
class HostEnded:
    """What became of the ranks of a host.

    Attributes:
        code: The exit status of its launcher.
        headline: Which rank failed first there, in a line; empty if none did.
        is_consequence: It failed because of a rank elsewhere, as far as it knows.
    """

    host: int
    code: int
    headline: str
    is_consequence: bool = False


def _relay(pipe: Connection, store: Any, hosts: JobHosts) -> None:
    """Tell the store how this host ended, then the launcher that it knows; and how others did."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)  # torch has 20 lines to say when host 0 ends first
    unknown = set(range(hosts.count)) - {hosts.number}
    with contextlib.suppress(EOFError, OSError):
        while True:
            if pipe.poll(_LOOK_S if unknown else None):
                ended = pipe.recv_bytes()
                store.set(f"{_PREFIX}/ended/{hosts.number}", ended)
                pipe.send_bytes(ended)  # it is told: the launcher may go
            try:
                known = [n for n in unknown if store.check([f"{_PREFIX}/ended/{n}"])]
            except RuntimeError:  # host 0 is gone
                _say(
                    pipe,
                    asdict(
                        HostEnded(
                            0, 1, "the launcher on host 0, which has the store, is gone", True
                        )
                    ),
                )
                known, unknown = [], set()
            for number in known:
                unknown.discard(number)
                pipe.send_bytes(store.get(f"{_PREFIX}/ended/{number}"))
