"""Test hosts on one machine: namespaces on a switch, with links that can be shaped.

Called by tests and benchmarks that need more than one host: what crosses a link can be counted, and
links can be as slow as real ones. Needs Linux, root and iproute2 (``ip``, ``tc``); ask
:func:`hosts_unavailable_reason` first. Ranks are started by :func:`paceline.testing.run_ranks`;
this file only places them. Must not know anything about DDP.

A host is a network namespace with ``lo`` and one device, ``link0``, which leads to a switch (a
bridge in a namespace of its own). Memory, files and the clock are shared by all, so the rendezvous
is a file, and ``PACELINE_HOST_ID`` says which ranks are to believe that they share a host.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.testing.namespaces import Namespace, enter, run_here, sent_bytes
from paceline.testing.payload import pack_call, unpack_call
from paceline.testing.ranks import run_ranks

T = TypeVar("T")

LINK = "link0"
"""The device of every host."""

_MAX_HOSTS = 200
_RATE = re.compile(r"[1-9]\d*(\.\d+)?[kmg]bit")
# As much as the kernel's clock lets through between two ticks at 10 Gbit/s; a queue of 50 ms.
_QUEUE = ("burst", "256kb", "latency", "50ms")


class Hosts:
    """The hosts of one :func:`test_hosts` block."""

    def __init__(self, namespaces: Sequence[Namespace]) -> None:
        self._namespaces = tuple(namespaces)

    def __len__(self) -> int:
        return len(self._namespaces)

    @property
    def paths(self) -> list[str]:
        """For each host, the file that stands for its namespace."""
        return [namespace.path for namespace in self._namespaces]

    def sent_bytes(self) -> list[int]:
        """For each host, how many bytes it has sent over its link since it exists."""
        return [space.call(lambda: sent_bytes(LINK)) for space in self._namespaces]

    def link_bytes(self) -> int:
        """How many bytes have left any host over its link, packet headers included."""
        return sum(self.sent_bytes())


@contextlib.contextmanager
def test_hosts(n: int = 2, *, rate: str | None = None) -> Iterator[Hosts]:  # noqa: PT028
    """Make ``n`` hosts that reach each other, and take them down on the way out.

    Args:
        n: How many hosts.
        rate: The speed of every host's link, for each direction, in tc's words: ``"1gbit"``,
            ``"100mbit"``. None does not limit it.

    Raises:
        ConfigurationError: An argument is wrong.
        OSError: This machine cannot: :func:`hosts_unavailable_reason` says what is missing.
    """
    if type(n) is not int or not 1 <= n <= _MAX_HOSTS:
        raise ConfigurationError(f"test_hosts needs 1 to {_MAX_HOSTS} hosts, as an int, not {n!r}")
    if rate is not None:
        _check_rate(rate)
    with contextlib.ExitStack() as stack:
        spaces = []
        for _ in range(n + 1):
            spaces.append(Namespace())
            stack.callback(spaces[-1].close)
        switch, *hosts = spaces
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            _connect(switch, host, number, rate)
        yield Hosts(hosts)


test_hosts.__test__ = False  # type: ignore[attr-defined]  # for pytest: this is none


def run_on_hosts(
    hosts: Hosts,
    ranks_per_host: int | Sequence[int],
    fn: Callable[..., T],
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    backend: str = "gloo",
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
    threads: int = 1,
) -> list[T]:
    """Call ``fn(*args)`` on ranks of every host and return what each returned, in rank order.

    Ranks are numbered host by host. As :func:`paceline.testing.run_ranks`, with the same deadline,
    errors and arguments; on top, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK`` (the host's
    number), ``PACELINE_HOST_ID`` and ``GLOO_SOCKET_IFNAME`` are those of the rank's host.

    Args:
        hosts: From :func:`test_hosts`.
        ranks_per_host: How many on each, or one number for each host.
    """
    counts = [ranks_per_host] * len(hosts) if isinstance(ranks_per_host, int) else ranks_per_host
    if len(counts) != len(hosts) or any(type(count) is not int or count < 1 for count in counts):
        raise ConfigurationError(
            f"ranks_per_host is an int above 0, or one for each of the {len(hosts)} hosts; it is "
            f"{ranks_per_host!r}"
        )
    places = tuple(
        _HostRank(number, path, local, count)
        for number, (path, count) in enumerate(zip(hosts.paths, counts, strict=True))
        for local in range(count)
    )
    call = _HostCall(places, pack_call(fn, args), backend if init else None, timeout_s)
    # What run_ranks calls it in its errors.
    name = getattr(fn, "__qualname__", repr(fn))
    call.__dict__["__qualname__"] = f"{name} on {len(hosts)} hosts"
    return run_ranks(
        len(places),
        call,
        timeout_s=timeout_s,
        grace_s=grace_s,
        init=False,
        env=env,
        threads=threads,
    )


def shape_link(rate: str) -> None:
    """Limit what this host sends from now on. Called in a rank; once on every host is enough.

    Raises:
        ConfigurationError: The rate is not understood.
        OSError: tc refuses.
    """
    _check_rate(rate)
    run_here("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", "rate", rate, *_QUEUE)


@functools.cache
def hosts_unavailable_reason() -> str | None:
    """Say why :func:`test_hosts` cannot work here, or None if it can."""
    if sys.platform != "linux":
        return f"test hosts need Linux (network namespaces), and this is {sys.platform}"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"test hosts need iproute2: there is no {' and no '.join(missing)} on PATH"
    if os.geteuid() != 0:
        return f"test hosts need root, and this is user {os.geteuid()}"
    try:
        with test_hosts(1, rate="1gbit"):
            return None
    except OSError as error:
        return f"test hosts need root that may make network namespaces, veth and tbf: {error}"


def _check_rate(rate: str) -> None:
    if not _RATE.fullmatch(rate):
        raise ConfigurationError(f'rate is written as "1gbit" or "100mbit", not {rate!r}')


def _connect(switch: Namespace, host: Namespace, number: int, rate: str | None) -> None:
    port = f"port{number}"
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "link", "add", LINK, "type", "veth", "peer", "name", port, "netns", switch.path)
    host.run("ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", LINK)
    switch.run("ip", "link", "set", port, "master", "switch", "up")
    host.run("ip", "link", "set", LINK, "up")
    if rate is not None:
        # What a host sends is held back on its own end, what it receives on the switch's.
        for space, device in ((host, LINK), (switch, port)):
            shape = ("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *_QUEUE)
            space.run(*shape)


@dataclass(frozen=True)
class _HostRank:
    """Where one rank runs."""

    host: int
    namespace: str
    local_rank: int
    local_world: int

    def take(self) -> None:
        """Move this process to its host. Before torch has opened a socket or started a thread."""
        enter(self.namespace)
        os.environ |= {
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.host),
            "PACELINE_HOST_ID": f"test-host-{self.host}",
            "GLOO_SOCKET_IFNAME": LINK,
        }


@dataclass(frozen=True)
class _HostCall:
    """What every rank runs: take its place, make the group there, then the caller's function."""

    places: tuple[_HostRank, ...]
    work: bytes
    backend: str | None
    timeout_s: float

    def __call__(self) -> Any:
        rank = int(os.environ["RANK"])
        self.places[rank].take()
        fn, args = unpack_call(self.work)
        if self.backend is not None:
            self._join_group(rank, self.backend)
        return fn(*args)

    def _join_group(self, rank: int, backend: str) -> None:
        world = len(self.places)
        file = os.environ["PACELINE_TEST_INIT_METHOD"].removeprefix("file://") + ".hosts"
        store = dist.FileStore(file, world)  # type: ignore[attr-defined]
        timeout = datetime.timedelta(seconds=self.timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        # As in rank_process: nobody runs fn before everybody is connected.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(world)])
