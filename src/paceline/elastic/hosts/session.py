"""A launcher, as the coordinator holds it: one session over all its connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from paceline.elastic.hosts.lease import FIRST_HOST
from paceline.elastic.hosts.numbered_messages import NumberedMessages
from paceline.elastic.members import ElasticPolicy
from paceline.elastic.protocol import send
from paceline.errors import MembershipError


@dataclass(eq=False)
class HostSession:
    """A launcher that was let in.

    Attributes:
        launcher: Drawn by that process: one that is started again has another.
        on_lost: Called with the connection before it is closed.
        store_port: The port at which the job's stores are, if they are with this launcher.
        listens: Where ranks of that host listen.
        is_finished: Nothing runs there any more.
        rival: Another launcher that says that it is of the same host.
        outlives_rival: This one was heard of since that has asked.
    """

    host: int
    launcher: str
    ranks: int
    on_lost: Callable[[Connection], object]
    messages: NumberedMessages = field(default_factory=NumberedMessages)
    pipe: Connection | None = None
    store_port: int = 0
    listens: list[str] = field(default_factory=list)
    is_finished: bool = False
    rival: str = ""
    outlives_rival: bool = False

    def lives_beside(self, rival: str) -> bool:
        """Whether this launcher and another one of the same host live at the same time.

        A connection alone does not say so: who loses its power, or its network, does not hang up.
        """
        if rival != self.rival:
            self.rival, self.outlives_rival = rival, False
        return self.outlives_rival

    def tell(self, kind: str, **facts: Any) -> None:
        """Say something that must arrive; if the connection is gone, over the next one."""
        self.send(self.messages.say(kind, **facts))

    def send(self, message: dict[str, Any]) -> None:
        """Send over the present connection, if there is one."""
        if self.pipe is not None:
            try:
                send(self.pipe, **message)
            except OSError:
                self.hang_up()

    def hang_up(self) -> None:
        """Close the present connection. It may come back, until its lease is over."""
        if self.pipe is not None:
            pipe, self.pipe = self.pipe, None
            self.on_lost(pipe)
            pipe.close()


class HostSessions(dict[int, HostSession]):
    """All launchers that were let in, by host."""

    def tell_all(self, kind: str, **facts: Any) -> None:
        """Say the same to all."""
        for each in self.values():
            each.tell(kind, **facts)

    def store_port(self) -> int:
        """At which port of the first host the job's stores are; 0: nobody knows."""
        return self[FIRST_HOST].store_port if FIRST_HOST in self else 0

    def tell_store_port(self) -> None:
        """Tell all where the stores are."""
        self.tell_all("store", store_port=self.store_port())

    def tell_peers(self) -> None:
        """Tell each where ranks of the others listen."""
        for each in self.values():
            others = [other for other in self.values() if other is not each]
            each.tell("peers", listens=[end for other in others for end in other.listens])

    def have_finished(self) -> bool:
        """Whether nothing runs on any of them."""
        return bool(self) and all(each.is_finished for each in self.values())


class NotYetError(MembershipError):
    """A launcher that may try again."""


def check_host(
    policy: ElasticPolicy,
    there: HostSession | None,
    hello: dict[str, Any],
    is_over: bool,
) -> None:
    """Whether a launcher may take part.

    Raises:
        MembershipError: Why not.
    """
    host, hosts, most = int(hello["host"]), int(hello["hosts"]), policy.max_hosts
    if not 0 <= host < most or int(hello["ranks"]) < 1:
        raise MembershipError(
            f"there are hosts 0 to {most - 1} in this job, and this is host {host}: --nnodes and "
            "--node-rank do not fit"
        )
    if hosts != most:
        raise MembershipError(
            f"hosts disagree about --nnodes: {most} on the first, {hosts} on host {host}"
        )
    if there is not None and there.launcher != hello["launcher"]:
        if there.lives_beside(str(hello["launcher"])):
            raise MembershipError(f"two hosts have --node-rank {host}")
        raise NotYetError(f"host {host} was started again; its lease from before is not over")
    if is_over and there is None:
        raise MembershipError("the job is over")
