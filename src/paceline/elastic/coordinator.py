"""The coordinator: talks to the launchers of all hosts, and does what :mod:`membership` decides.

A process of its own, started by the first host's launcher (:mod:`paceline.elastic.job`), and
started again if it dies: [Note: taking over]. Launchers start and kill the ranks, and pass on what
it says to them. All decisions are made in one thread. Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from paceline.elastic.events import Reasons
from paceline.elastic.handshake import limit_waits
from paceline.elastic.hosts.lease import FIRST_HOST, LeaseTable, now_s
from paceline.elastic.hosts.mailbox import Mailbox
from paceline.elastic.hosts.session import HostSession, HostSessions, NotYetError, check_host
from paceline.elastic.hosts.takeover import HostReport, is_complete, put_together
from paceline.elastic.keyed_listener import KeyedListener, listen_at
from paceline.elastic.members import (
    Action,
    Begin,
    ElasticPolicy,
    End,
    Fail,
    Fork,
    Kill,
    Regroup,
    Release,
)
from paceline.elastic.membership import Membership
from paceline.elastic.protocol import receive, send
from paceline.elastic.stuck import StillRanks
from paceline.errors import MembershipError

_WRONG = (MembershipError, KeyError, ValueError, TypeError, AttributeError)
_WHEN_GATHERED = ("from", "exited", "leaving", "still")  # [Note: taking over]
_FAREWELL_S = 300.0  # for hosts to say that nothing runs there any more


@dataclass(frozen=True)
class CoordinatorOrder:
    """What a coordinator is started with.

    Attributes:
        path: Of the Unix socket for the launcher of this host.
        address: Where it listens to those of other hosts; None on one host.
        lease_s: [Note: leases].
        maximum: More ranks than this are refused.
    """

    policy: ElasticPolicy
    key: bytes = field(repr=False)
    path: str
    address: tuple[str, int] | None = None
    lease_s: float = 15.0
    maximum: int = 4096


class Coordinator:
    """Runs one job's membership.

    Attributes:
        outcome: None while the job is under way; then why it failed, empty if it did not.
    """

    def __init__(self, order: CoordinatorOrder) -> None:
        self.outcome: str | None = None
        self._order = order
        self._hosts = HostSessions()
        self._reports: dict[int, HostReport] = {}
        self._where: dict[int, int] = {}  # the host of each member whose process has not ended
        self._places: dict[int, int] = {}  # the member that has each rank of the present epoch
        self._is_gathering = True
        self._early: list[tuple[HostSession, dict[str, Any]]] = []  # heard while gathering
        self._reasons = Reasons()
        self._told_to_end = ""  # why, if the first host is
        self._is_over = False
        self._over_s = 0.0
        self._still = StillRanks()
        self._id = os.urandom(8).hex()
        self._selector = selectors.DefaultSelector()
        self._mailbox = Mailbox(self._selector)
        listeners = [listen_at(order.path)]
        if order.address is not None:
            listeners.append(listen_at(order.address))
        # [Note: leases]: what it waits for begins when it can be connected to, not before.
        self._leases = LeaseTable(order.lease_s, now_s())
        self._membership = Membership(order.policy, now_s=now_s())
        self._listeners = [KeyedListener(each, order.key, self._on_newcomer) for each in listeners]

    # --- the loop ---------------------------------------------------------------------------------
    def run(self) -> None:
        """Coordinate until all hosts have finished."""
        while not self._is_over:
            for key, _ in self._selector.select(self._until_next_s()):
                if self._selector.get_map().get(key.fd) == key:
                    key.data()
            self._tick()

    def _until_next_s(self) -> float:
        at_s = now_s()
        dues = [self._leases.next_due_s(at_s), self._membership.next_due_s()]
        if self.outcome is not None:
            dues = [self._leases.next_due_s(at_s), self._over_s]
        return max(0.0, min(due for due in dues if due is not None) - at_s)

    def _tick(self) -> None:
        at_s = now_s()
        for host in self._leases.over(at_s):
            if host in self._hosts:
                self._drop(self._hosts[host])
        if self._is_gathering:
            self._try_resume(is_late=self._leases.has_waited(at_s))
        if self.outcome is None:
            self._do(self._membership.on_tick(at_s))
        elif self._hosts.have_finished() or at_s >= self._over_s:
            self._hosts.tell_all("over")
            self._is_over = True

    def _on_newcomer(self, hello: dict[str, Any], pipe: Connection) -> None:
        """In a thread of a listener."""
        self._mailbox.post(partial(self._admit, hello, pipe))

    # --- launchers come and go --------------------------------------------------------------------
    def _admit(self, hello: dict[str, Any], pipe: Connection) -> None:
        try:
            host, ranks = int(hello["host"]), int(hello["ranks"])
            launcher, report = str(hello["launcher"]), HostReport.from_plain(hello["report"])
            heard, is_ours = int(hello["heard"]), hello["coordinator"] == self._id
            is_over = self.outcome is not None
            check_host(self._order.policy, self._hosts.get(host), hello, is_over)
        except _WRONG as error:
            with pipe, contextlib.suppress(OSError):
                is_final = not isinstance(error, NotYetError)
                send(pipe, "refused", why=str(error), is_final=is_final)
            return
        limit_waits(pipe, self._order.lease_s / 4)
        session = self._hosts.get(host)
        is_known = is_ours and session is not None and session.launcher == launcher
        if session is None or not is_known:
            session = self._hosts[host] = HostSession(
                host, launcher, ranks, self._selector.unregister
            )
        session.hang_up()
        session.pipe, session.store_port = pipe, int(hello["store_port"])
        self._leases.heard(host, now_s())
        self._selector.register(pipe, selectors.EVENT_READ, partial(self._listen_to, session))
        keep = [each.id for each in report.members] if self._is_gathering or is_known else []
        welcome = {"coordinator": self._id, "is_known": is_known, "keep": keep}
        welcome |= {"heard": session.messages.heard, "store_port": self._hosts.store_port()}
        session.send({"kind": "welcome", **welcome})
        if is_known:
            session.messages.confirm(heard)
            for message in session.messages.unheard():
                session.send(message)
        else:
            if session.store_port:
                self._hosts.tell_store_port()
            self._on_host(session, report)

    def _on_host(self, session: HostSession, report: HostReport) -> None:
        """A launcher whose members are not known here, as far as it has any."""
        if self.outcome is not None:
            session.tell("outcome", why=self.outcome)
            return
        if self._is_gathering:
            self._reports[session.host] = report
            if not any(each.knows_something for each in self._reports.values()):
                self._do(self._membership.on_host(session.host, session.ranks))
                self._stop_gathering(is_over=self._membership.is_started)
            else:
                self._try_resume(is_late=self._leases.has_waited(now_s()))
        else:
            self._do(self._membership.on_host(session.host, session.ranks))
        self._tell_peers()

    def _try_resume(self, *, is_late: bool) -> None:
        """Take over, if all is known that can be: [Note: taking over]."""
        reports = self._reports
        if not any(each.knows_something for each in reports.values()):
            self._stop_gathering(is_over=self._membership.is_started)
            return
        # The first host has no lease: its ranks run, however late its launcher is.
        if not is_complete(reports) and not (is_late and FIRST_HOST in reports):
            return
        membership = self._membership
        for host, session in self._hosts.items():
            membership.hosts.put(host, session.ranks)
        for report in reports.values():
            membership.next_id = max(membership.next_id, report.next_id)
        outcome = next((r.outcome for r in reports.values() if r.outcome is not None), None)
        if outcome is not None:
            self._end(outcome)
            return
        membership.on_tick(now_s())
        found = put_together(reports)
        self._where |= {who.id: who.host for who in found.members}
        self._do(membership.resume(found))
        self._stop_gathering()

    def _stop_gathering(self, *, is_over: bool = True) -> None:
        """All is known; now hear what launchers have said since they reported."""
        self._is_gathering = not is_over
        while is_over and self._early and self.outcome is None:
            session, message = self._early.pop(0)
            if self._hosts.get(session.host) is session:
                self._hear(session, message)

    def _drop(self, session: HostSession) -> None:
        """Its lease is over: what ran there has stopped."""
        session.hang_up()
        self._leases.forget(session.host)
        self._reports.pop(session.host, None)
        del self._hosts[session.host]
        if self.outcome is None and session.host in self._membership.hosts.known:
            why = f"host {session.host} was not heard from for {self._order.lease_s:g} s"
            if any(who.host == session.host for who in self._membership.inside()):
                self._reasons.add(why)
            self._do(self._membership.on_host_lost(session.host, why))

    # --- what launchers say -----------------------------------------------------------------------
    def _listen_to(self, session: HostSession) -> None:
        assert session.pipe is not None
        try:
            message = receive(session.pipe)
            is_new = session.messages.take(message)
        except (EOFError, OSError, MembershipError):
            session.hang_up()  # it may come back, until its lease is over
            return
        session.outlives_rival = True
        if is_new:
            self._hear(session, message)

    def _hear(self, session: HostSession, message: dict[str, Any]) -> None:
        if self._is_gathering and message["kind"] in _WHEN_GATHERED:
            self._early.append((session, message))
            return
        try:
            self._take_in(session, message)
        except MembershipError:
            session.hang_up()
        except _WRONG as error:
            self._end(f"the launcher of host {session.host} said what makes no sense: {error!r}")

    def _take_in(self, session: HostSession, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "alive":
            self._leases.heard(session.host, now_s())
            granted = {"kind": "granted", "beat": int(message["beat"])}
            session.send(granted | {"heard": session.messages.heard})
        elif kind == "listens":
            session.listens = [str(each) for each in message["listens"]][:4096]
            self._tell_peers()
        elif kind == "finished":
            session.is_finished = True
        elif kind == "scale":
            session.tell("answer", ask=message["ask"], error=self._scale(message))
        elif self.outcome is None:
            self._hear_news(session, message)

    def _hear_news(self, session: HostSession, message: dict[str, Any]) -> None:
        """What counts only while the job is under way."""
        membership, kind = self._membership, message["kind"]
        if kind == "from":
            self._do(self._hear_member(int(message["member"]), message["message"]))
        elif kind == "exited":
            self._on_exit(int(message["member"]), str(message["why"]), bool(message["is_quiet"]))
        elif kind == "leaving" and session.host == FIRST_HOST:  # the coordinator ends with it
            self._told_to_end = str(message["why"])
            self._do(membership.on_host_leaving(None))
        elif kind == "leaving":
            self._do(membership.on_host_leaving(session.host))
        elif kind == "still":
            training = [m for m, who in membership.members.items() if who.is_training]
            for member, why in self._still.judge(message["ranks"], training, now_s()).items():
                self._tell_host_of(member, "kill", {"why": why})
        elif kind == "store":
            session.store_port = int(message["store_port"])
            self._hosts.tell_store_port()
        elif kind == "stop":
            self._end(str(message["why"]))
        else:
            raise MembershipError(f"unknown message {kind!r}")

    def _hear_member(self, member: int, message: dict[str, Any]) -> list[Action]:
        membership, kind = self._membership, message["kind"]
        if member not in membership.members:
            return []
        if kind == "joined":
            return membership.on_joined(member)
        if kind == "ready":
            return membership.on_ready(member, int(message["step"]), bool(message["is_clean"]))
        if kind == "done":
            return membership.on_done(member, int(message["step"]))
        if kind == "leave":
            return membership.on_leave(member)
        if kind == "broken":
            return membership.on_broken(member, str(message["why"]))
        if kind == "entered":
            self._hosts.tell_all("epoch", event=message["event"])
            return []
        if kind == "missing":
            is_now = int(message["epoch"]) == membership.epoch
            late = [self._places.get(int(rank), -1) for rank in message["ranks"] if is_now]
            return [Kill(m, "others waited for it to begin their epoch") for m in late if m >= 0]
        return [Kill(member, f"it said something that makes no sense: {kind!r}")]

    def _on_exit(self, member: int, why: str, is_quiet: bool) -> None:
        self._where.pop(member, None)
        if any(who.id == member for who in self._membership.inside()):
            self._reasons.add(why)
        if is_quiet and self._membership.epoch < 0 and member in self._membership.members:
            self._end(f"{why}, and never called a function under @elastic.run")
        else:
            self._do(self._membership.on_died(member, why))

    def _scale(self, message: dict[str, Any]) -> str:
        """Do what somebody asks for who knows the key; say what is wrong."""
        ranks, minimum = int(message["ranks"]), self._membership.policy.minimum
        if self.outcome is not None:
            return "the job is over"
        if not minimum <= ranks <= self._order.maximum:
            return f"this job may have {minimum} to {self._order.maximum} ranks, not {ranks}"
        self._do(self._membership.on_scale(ranks))
        self._hosts.tell_all("scaled", ranks=ranks)
        return ""

    def _tell_peers(self) -> None:
        if self._order.address is not None:
            self._hosts.tell_peers()

    # --- actions ----------------------------------------------------------------------------------
    def _do(self, actions: list[Action]) -> None:
        begins = [action for action in actions if isinstance(action, Begin)]
        hosts = sorted({self._where[action.member] for action in begins})
        why = self._reasons.take() if begins else ""
        if begins:
            self._places = {action.rank: action.member for action in begins}
        for action in actions:
            if isinstance(action, Begin):
                facts = {"hosts": hosts, "why": why}
                self._say(action.member, "begin", asdict(action) | facts)
            else:
                self._carry_out(action)
        if self._membership.is_finished and self.outcome is None:
            self._end(self._told_to_end)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Fork():
                self._where[action.member] = action.host
                self._tell_host_of(action.member, "fork", asdict(action) | self._up())
            case Kill():
                self._tell_host_of(action.member, "kill", asdict(action))
            case End():
                self._reasons.add(action.why)
                self._say(action.member, "end", asdict(action))
            case Regroup():
                self._reasons.add("ranks are to join or to leave")
                self._say(action.member, "regroup")
            case Release():
                self._say(action.member, "release", asdict(action) | {"why": self._reasons.text()})
            case Fail():
                self._end(action.why)

    def _up(self) -> dict[str, list[int]]:
        up = self._membership.hosts.up()
        return {"hosts": [each.number for each in up], "worlds": [each.ranks for each in up]}

    def _say(self, member: int, kind: str, facts: dict[str, Any] | None = None) -> None:
        self._tell_host_of(member, "say", {"message": {**(facts or {}), "kind": kind}})

    def _tell_host_of(self, member: int, kind: str, facts: dict[str, Any]) -> None:
        session = self._hosts.get(self._where.get(member, -1))
        if session is not None:
            session.tell(kind, **{**facts, "member": member})

    def _end(self, why: str) -> None:
        """The job is over; what is left is that all hosts finish."""
        if self.outcome is None:
            self.outcome, self._over_s = why, now_s() + _FAREWELL_S
            self._hosts.tell_all("outcome", why=why)

    def close(self) -> None:
        """Let nobody in any more, and hang up."""
        for each in self._listeners:
            each.close()
        for session in self._hosts.values():
            session.hang_up()
        self._mailbox.open()
        for session in self._hosts.values():
            session.hang_up()
        self._mailbox.close()
        self._selector.close()
