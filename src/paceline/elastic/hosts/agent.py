"""A launcher's part in an elastic job: between its ranks and the coordinator.

Used by :mod:`paceline.elastic.job`, which starts and kills processes. What ranks say goes on to the
coordinator, what the coordinator says goes on to them, and the agent remembers what a new
coordinator has to know ([Note: taking over]). It keeps the host's lease ([Note: leases]). All of it
happens in the launcher's thread. Must not import torch.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.elastic.handshake import KEY_BYTES, store_key
from paceline.elastic.hosts.lease import now_s
from paceline.elastic.hosts.lease_file import write_lease
from paceline.elastic.hosts.link import CoordinatorLink, LinkPlan
from paceline.elastic.hosts.mailbox import Mailbox
from paceline.elastic.hosts.private_directory import PrivateDirectory
from paceline.elastic.hosts.rank_pipes import RankPipes
from paceline.elastic.hosts.takeover import HostReport, MemberReport
from paceline.elastic.members import MemberState
from paceline.elastic.protocol import (
    coordinator_path,
    key_path,
    lease_path,
    peers_path,
    store_path,
    temporary_path,
)
from paceline.observe.private_file import write_whole

_EXITS = 8
CUT_OFF = "its host has lost the coordinator, and its lease is over"


class Launcher(Protocol):
    """Starts and kills processes, and shows what happens."""

    def fork(self, order: dict[str, Any]) -> None:
        """Start a member."""

    def kill(self, member: int, why: str, *, at_once: bool = False) -> None:
        """Kill it, after it has said where it is; its exit is told to the agent once it is over."""

    def pid_of(self, member: int) -> int:
        """Its process; 0 if it has none."""

    def on_epoch(self, event: dict[str, Any]) -> None:
        """A rank has begun an epoch: the fields of ``MembershipEvent``."""

    def on_store(self, store_port: int) -> None:
        """At which port of the first host the job's stores are; 0: nobody knows yet."""

    def listens(self) -> list[str]:
        """Where ranks of this host listen."""


@dataclass(frozen=True)
class AgentPlan:
    """What an agent is made with.

    Attributes:
        host: Its number.
        hosts: How many there are at most.
        ranks: How many this launcher was asked for.
        key: Of the job; None: make one.
        address: Of the coordinator; None: it is on this host.
        lease_s: [Note: leases].
    """

    host: int
    hosts: int
    ranks: int
    key: bytes | None = field(default=None, repr=False)
    address: tuple[str, int] | None = None
    lease_s: float = 15.0


class Agent:
    """One launcher's conversations.

    Attributes:
        directory: Private; what :data:`~paceline.elastic.protocol.DIRECTORY` names for members.
        key: Of the job.
        ranks: The connections with the ranks of this host.
        members: What is known of the members of this host that live.
        outcome: None while the job is under way; then why it failed, empty if it did not.
        is_over: All hosts have finished.
        store_port: The port at which other hosts reach the job's stores, if they are here.
    """

    def __init__(
        self, plan: AgentPlan, launcher: Launcher, selector: selectors.BaseSelector
    ) -> None:
        self._private = PrivateDirectory()
        self.directory = self._private.path
        self.key = plan.key or os.urandom(KEY_BYTES).hex().encode()
        store_key(key_path(self.directory), self.key)
        self.members: dict[int, MemberReport] = {}
        self.outcome: str | None = None
        self.is_over = False
        self.store_port = 0
        self._plan = plan
        self._launcher = launcher
        self._known = HostReport()
        self._told_listens: list[str] = []
        self._shown_epoch = -1
        self._mailbox = Mailbox(selector)
        self.ranks = RankPipes(
            self.directory,
            self.key,
            self._mailbox,
            selector,
            is_member=lambda member: member in self.members,
            hear=self._hear_rank,
            scale=lambda ask, ranks: self._link.say("scale", ask=ask, ranks=ranks),
            complain=launcher.kill,
        )
        address = plan.address or coordinator_path(self.directory)
        link = LinkPlan(address, self.key, plan.lease_s, plan.address is not None)
        self._is_leased = link.is_leased
        self._link = CoordinatorLink(link, self, self._mailbox, selector)

    # --- what the launcher tells, and asks --------------------------------------------------------
    def on_exit(self, member: int, why: str, *, is_quiet: bool) -> None:
        """A member's process has ended; quietly, if it ended well and nobody had asked for it."""
        self.ranks.drop(member)
        shutil.rmtree(temporary_path(self.directory, member), ignore_errors=True)
        if self.members.pop(member, None) is not None:
            self._known.exits = [*self._known.exits[1 - _EXITS :], why]
            self._link.say("exited", member=member, why=why, is_quiet=is_quiet)

    def say(self, kind: str, **facts: Any) -> None:
        """Tell the coordinator."""
        self._link.say(kind, **facts)

    @property
    def is_welcome(self) -> bool:
        """Whether the coordinator is there."""
        return self._link.is_welcome

    @property
    def away_s(self) -> float:
        """For how long it has not been there."""
        return self._link.away_s

    @property
    def silent_s(self) -> float:
        """For how long a beat has been waiting for an answer."""
        return self._link.lease.silent_s(now_s())

    def pids_that_train(self) -> dict[int, int]:
        """Processes of this host, by place: for whoever reads the run folder."""
        training = MemberState.TRAINING.value
        found = [each for each in self.members.values() if each.state == training]
        return {each.slot: pid for each in found if (pid := self._launcher.pid_of(each.id))}

    def has_all_ranks(self) -> bool:
        """Whether no other host has ranks of the present epoch."""
        return self._known.hosts in ([], [self._plan.host])

    def has_said_all(self) -> bool:
        """Whether the coordinator has heard all that it was told."""
        return self._link.has_said_all()

    def until_next_s(self) -> float | None:
        """Seconds until :meth:`tick` has something to do; None for never."""
        waits = [self._link.until_next_s()]
        if self._is_leased and self.members:
            waits.append(self._link.lease.left_s(now_s()))
        return min((wait for wait in waits if wait is not None), default=None)

    def tick(self) -> None:
        """Time has passed."""
        self._link.tick()
        lease = self._link.lease
        if not self._is_leased or lease.until_s is None:
            return
        write_lease(lease_path(self.directory), lease.until_s, lease.lease_s)
        if lease.is_over(now_s()):
            for member in list(self.members):
                self._launcher.kill(member, CUT_OFF, at_once=True)

    # --- ranks ------------------------------------------------------------------------------------
    def _hear_rank(self, member: int, message: dict[str, Any]) -> None:
        known, kind = self.members[member], message["kind"]
        if kind == "joined":
            known.state = MemberState.WAITING.value
        elif kind == "ready" and int(message["step"]) < 0:
            known.state, known.epoch = MemberState.WAITING.value, -1  # its copy was cut short
        elif kind == "ready":
            known.state = MemberState.READY.value
            known.step, known.is_clean = int(message["step"]), bool(message["is_clean"])
        elif kind == "done":
            known.state, known.step = MemberState.DONE.value, int(message["step"])
        elif kind == "leave":
            known.is_terminated = True
        self._link.say("from", member=member, message=message)

    # --- the coordinator --------------------------------------------------------------------------
    def hello(self) -> dict[str, Any]:
        """What a coordinator is told at first: who this is, and all that is known."""
        self._known.members = list(self.members.values())
        return {
            "host": self._plan.host,
            "hosts": self._plan.hosts,
            "ranks": self._plan.ranks,
            "report": self._known.to_plain(),
            "store_port": self.store_port,
        }

    def on_beat(self) -> None:
        """Tell where ranks listen, if that has changed."""
        listens = self._launcher.listens() if self._plan.hosts > 1 else []
        if listens != self._told_listens:
            self._told_listens = listens
            self._link.say("listens", listens=listens)

    def on_welcome(self, message: dict[str, Any]) -> None:
        """A coordinator is there: one that knows this host, or one that has its report."""
        keep = {int(member) for member in message["keep"]}
        for member in list(self.members):
            if member not in keep and not message["is_known"]:
                self._kill(member, "the job went on without its host")
        if not message["is_known"]:
            self._told_listens = []
        self._launcher.on_store(int(message["store_port"]))
        self.ranks.say_to_all("back")

    def on_away(self) -> None:
        """The coordinator is gone; ranks go on, and wait for it if they have to."""
        self.ranks.say_to_all("away")

    def on_refused(self, why: str) -> None:
        """It does not want this host."""
        if self.outcome is None:
            self.outcome = why
            self.is_over = True

    def on_order(self, message: dict[str, Any]) -> None:
        """Do what the coordinator says."""
        kind = message["kind"]
        if kind == "fork":
            self._fork(message)
        elif kind == "kill":
            self._kill(int(message["member"]), str(message["why"]))
        elif kind == "say":
            self._say(int(message["member"]), message["message"])
        elif kind == "answer":
            self.ranks.answer(int(message["ask"]), str(message["error"]))
        elif kind == "peers":
            write_whole(peers_path(self.directory), json.dumps(message["listens"]))
        elif kind == "store":
            self._launcher.on_store(int(message["store_port"]))
        else:
            self._hear_of_job(message)

    def _hear_of_job(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "epoch":
            self._show_epoch(dict(message["event"]))
        elif kind == "scaled":
            self._known.scaled_to = int(message["ranks"])
        elif kind == "outcome" and self.outcome is None:
            self.outcome = self._known.outcome = str(message["why"])
        elif kind == "over":
            self.is_over = True

    def _show_epoch(self, event: dict[str, Any]) -> None:
        if int(event["epoch"]) <= self._shown_epoch:
            return  # a coordinator died before it said that it had heard of it: two have told it
        self._shown_epoch = int(event["epoch"])
        self._launcher.on_epoch(event)
        self.on_beat()  # ranks have connected just now

    def _fork(self, order: dict[str, Any]) -> None:
        member, is_first = int(order["member"]), bool(order["is_first"])
        attempt = int(order["attempt"]) if is_first else -1
        self.members[member] = MemberReport(member, int(order["slot"]), attempt=attempt)
        self._known.next_id = max(self._known.next_id, member + 1)
        if self._known.epoch < 0:
            self._known.world, self._known.hosts = int(order["world"]), order["hosts"]
        self._launcher.fork(order)

    def _kill(self, member: int, why: str) -> None:
        """Whoever asks hears of its end, also if there is nothing to kill."""
        if member not in self.members:
            gone = f"process {member} of the job had ended"
            self._link.say("exited", member=member, why=gone, is_quiet=False)
        elif not self._launcher.pid_of(member):
            gone = f"rank {self.members[member].slot} was not started: {why}"
            self.on_exit(member, gone, is_quiet=False)
        else:
            self._launcher.kill(member, why)

    def _say(self, member: int, message: dict[str, Any]) -> None:
        known = self.members.get(member)
        if known is not None and message["kind"] == "begin":
            known.state, known.epoch = MemberState.TRAINING.value, int(message["epoch"])
            known.step, known.is_clean = int(message["step"]), True
            report, epoch = self._known, known.epoch
            report.epoch, report.world = epoch, int(message["world"])
            report.hosts, report.exits = message["hosts"], []
            others = [self._launcher.pid_of(m) for m in self.members if m != member]
            message["pids"] = [pid for pid in others if pid]
            unused = store_path(self.directory, f"epoch-{epoch - 2}")
            unused.unlink(missing_ok=True)
        self.ranks.say(member, message)

    def close(self) -> None:
        """Take no more members, hang up, and remove the directory."""
        self._link.close()
        self.ranks.close()
        self._mailbox.close()
        self._private.close()
