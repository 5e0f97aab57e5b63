"""Test hosts: ranks on them reach each other over a link that counts and can be slow."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.testing import RanksFailedError
from paceline.testing.hosts import (
    Hosts,
    hosts_unavailable_reason,
    run_on_hosts,
    shape_link,
    test_hosts,
)
from paceline.testing.namespaces import sent_bytes
from tests.conftest import own_processes

REASON = hosts_unavailable_reason()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))

MEGABYTE = 1_000_000


def sum_of_ranks(numel: int) -> torch.Tensor:
    value = torch.full((numel,), dist.get_rank() + 1.0)
    dist.all_reduce(value)
    return value


def timed_sum(numel: int) -> float:
    value = torch.ones(numel)
    dist.all_reduce(value)
    start_s = time.perf_counter()
    dist.all_reduce(value)
    return time.perf_counter() - start_s


def namespaces_in_use(pids: set[int] | None = None) -> set[str]:
    """The network namespaces that processes are in, or hold open: this one and its ranks."""
    found = set()
    for pid in {os.getpid(), *own_processes()} if pids is None else pids:
        for pattern in ("task/[0-9]*/ns/net", "fd/*"):
            found |= {link for path in Path(f"/proc/{pid}").glob(pattern) if (link := target(path))}
    return found


def target(path: Path) -> str:
    """The namespace that a link of /proc leads to, or nothing."""
    try:
        link = os.readlink(path)
    except OSError:  # it ended meanwhile
        return ""
    return link if link.startswith("net:[") else ""


def session(leader: int) -> set[int]:
    """The processes of a session."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= {int(path.name)} if os.getsid(int(path.name)) == leader else set()
    return found


def wait_gone(spaces: set[str], pids: Callable[[], set[int] | None] = lambda: None) -> None:
    """A thread that has been joined is for a moment still in its namespace."""
    until_s = time.monotonic() + 60
    while spaces & namespaces_in_use(pids()):
        assert time.monotonic() < until_s, "a namespace is left"
        time.sleep(0.02)


def inodes(hosts: Hosts) -> set[str]:
    return {os.readlink(path) for path in hosts.paths}


@needs_hosts
class TestHosts:
    def test_ranks_communicate_across_and_inside_hosts(self) -> None:
        with test_hosts(2) as hosts:
            results = run_on_hosts(hosts, 2, sum_of_ranks, 5)
        assert len(results) == 4
        for result in results:
            torch.testing.assert_close(result, torch.full((5,), 10.0))

    def test_every_rank_knows_its_host(self) -> None:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]

        def seat() -> tuple[list[str], str]:
            assert os.environ["GLOO_SOCKET_IFNAME"] == "link0"
            return [os.environ[name] for name in names], os.environ["PACELINE_HOST_ID"]

        with test_hosts(2) as hosts:
            seats = run_on_hosts(hosts, [2, 1], seat)
        assert [seat for seat, _ in seats] == [
            ["0", "3", "0", "2", "0"],
            ["1", "3", "1", "2", "0"],
            ["2", "3", "0", "1", "1"],
        ]
        ids = [host_id for _, host_id in seats]
        assert ids[0] == ids[1] != ids[2]

    def test_three_hosts(self) -> None:
        with test_hosts(3) as hosts:
            for result in run_on_hosts(hosts, 1, sum_of_ranks, 2):
                torch.testing.assert_close(result, torch.full((2,), 6.0))

    def test_bytes_on_the_link_are_counted(self) -> None:
        with test_hosts(2) as hosts:
            before = hosts.link_bytes()
            run_on_hosts(hosts, 1, sum_of_ranks, MEGABYTE)
            across = hosts.link_bytes() - before
            # Two ranks on one host talk over its loopback: nothing crosses.
            alone = Hosts(hosts._namespaces[:1])
            before = hosts.link_bytes()
            run_on_hosts(alone, 2, sum_of_ranks, MEGABYTE)
            inside = hosts.link_bytes() - before
        # 4 MB from each of two ranks, plus headers, acknowledgements and the set-up.
        assert 8 * MEGABYTE < across < 10 * MEGABYTE
        assert inside < 0.01 * MEGABYTE

    def test_a_rank_can_count_for_itself(self) -> None:
        def sent() -> int:
            before = sent_bytes("link0")
            dist.all_reduce(torch.ones(MEGABYTE))
            dist.barrier()  # the other rank has all of it, so this one has sent all of it
            return sent_bytes("link0") - before

        with test_hosts(2) as hosts:
            for count in run_on_hosts(hosts, 1, sent):
                # Headers, acknowledgements (more on a busy machine), the barrier.
                assert 4 * MEGABYTE < count < 5 * MEGABYTE

    @pytest.mark.alone
    def test_a_shaped_link_is_as_slow_as_it_says(self) -> None:
        with test_hosts(2) as hosts:
            free_s = max(run_on_hosts(hosts, 1, timed_sum, MEGABYTE // 2))
        with test_hosts(2, rate="20mbit") as hosts:
            shaped_s = max(run_on_hosts(hosts, 1, timed_sum, MEGABYTE // 2))
        assert shaped_s > 5 * free_s
        # 2 MB in each direction at 20 Mbit/s take 0.8 s; what fits the burst is free.
        assert 0.6 < shaped_s < 2.4

    @pytest.mark.alone
    def test_a_rank_can_change_the_speed_of_its_link(self) -> None:
        def both() -> list[float]:
            times_s = [timed_sum(MEGABYTE)]
            for rate in ("200mbit", "100mbit"):
                shape_link(rate)
                dist.barrier()
                times_s.append(timed_sum(MEGABYTE))
            return times_s

        with test_hosts(2) as hosts:
            for _, fast_s, slow_s in run_on_hosts(hosts, 1, both):
                assert fast_s > 0.29 / 2
                assert slow_s > 0.29


@needs_hosts
class TestNothingIsLeft:
    def test_after_a_normal_end(self) -> None:
        with test_hosts(2, rate="1gbit") as hosts:
            spaces = inodes(hosts)
            assert spaces <= namespaces_in_use()
            run_on_hosts(hosts, 1, dist.get_rank)
        wait_gone(spaces)

    def test_after_an_exception_in_a_rank(self) -> None:
        def fail() -> None:
            raise ValueError(f"trouble {dist.get_rank()}")

        with test_hosts(2) as hosts:
            spaces = inodes(hosts)
            with pytest.raises(RanksFailedError) as caught:
                run_on_hosts(hosts, 1, fail)
        text = str(caught.value)
        assert "fail on 2 hosts" in text
        for rank in (0, 1):
            assert f"--- rank {rank}: raised ValueError: trouble {rank}" in text
        wait_gone(spaces)

    def test_after_the_deadline(self) -> None:
        def stuck() -> None:
            while True:
                time.sleep(1)

        with test_hosts(2) as hosts:
            spaces = inodes(hosts)
            with pytest.raises(RanksFailedError, match="not done within timeout_s=3"):
                run_on_hosts(hosts, 1, stuck, timeout_s=3.0, init=False)
        wait_gone(spaces)

    def test_after_an_exception_in_the_block(self) -> None:
        spaces = set()

        def fail_inside() -> None:
            with test_hosts(2) as hosts:
                spaces.update(inodes(hosts))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail_inside()
        assert spaces
        wait_gone(spaces)

    def test_after_half_of_it_could_not_be_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wait_gone(namespaces_in_use() - {os.readlink("/proc/self/ns/net")})
        monkeypatch.setattr("paceline.testing.hosts.LINK", "a name that is too long for a device")
        with pytest.raises(OSError, match="ip link add"), test_hosts(2):
            pass
        wait_gone(namespaces_in_use() - {os.readlink("/proc/self/ns/net")})

    @pytest.mark.parametrize(
        "how",
        [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL],
        ids=lambda s: s.name,
    )
    def test_after_the_caller_went_away(self, how: signal.Signals, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        with subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "spaces")],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        ) as caller:
            file = tmp_path / "spaces"
            try:
                while not file.exists() or file.read_text().count("\n") < 2:
                    assert caller.poll() is None
                    time.sleep(0.02)
                spaces = set(file.read_text().split())
                assert spaces <= namespaces_in_use(session(caller.pid))
            finally:
                os.killpg(caller.pid, how) if how is signal.SIGINT else caller.kill()
            caller.wait(timeout=60)
        wait_gone(spaces, lambda: session(caller.pid))


SCRIPT = """
    import os, sys, threading
    from paceline.testing.hosts import run_on_hosts, test_hosts

    def stay(path):
        with open(path, "a") as file:
            file.write(os.readlink("/proc/thread-self/ns/net") + "\\n")
        threading.Event().wait()

    if __name__ == "__main__":
        with test_hosts(2) as hosts:
            run_on_hosts(hosts, 1, stay, sys.argv[1])
"""


class TestArguments:
    @pytest.mark.parametrize("n", [0, -1, 1.5, True, 1000])
    def test_number_of_hosts(self, n: object) -> None:
        with pytest.raises(ConfigurationError, match="1 to 200 hosts"), test_hosts(n):  # type: ignore[arg-type]
            pass

    @pytest.mark.parametrize("rate", ["fast", "1gb", "0mbit", "1gbit; reboot", ""])
    def test_rate(self, rate: str) -> None:
        with pytest.raises(ConfigurationError, match="100mbit"), test_hosts(2, rate=rate):
            pass

    @pytest.mark.parametrize("ranks", [0, [1, 2, 3], [1, 0], []])
    @needs_hosts
    def test_ranks_per_host(self, ranks: object) -> None:
        with (
            test_hosts(2) as hosts,
            pytest.raises(ConfigurationError, match="each of the 2 hosts"),
        ):
            run_on_hosts(hosts, ranks, dist.get_rank)  # type: ignore[arg-type]


class TestReason:
    @pytest.fixture(autouse=True)
    def fresh(self) -> object:
        hosts_unavailable_reason.cache_clear()
        yield
        hosts_unavailable_reason.cache_clear()

    def test_iproute2(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert "iproute2: there is no ip and no tc" in str(hosts_unavailable_reason())

    @needs_hosts
    def test_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "need root, and this is user 1000" in str(hosts_unavailable_reason())
