"""``paceline run --elastic``: the launcher's loop; an agent talks to the coordinator and the ranks.

Called by ``cli/run.py``. Of :class:`paceline.launch.job.Job` it keeps output, signals and shutdown;
a rank that ends is told to the coordinator, and is no reason to end the others. On the first host
it also keeps the coordinator running. Must not import torch.

[Note: fencing]
A rank that is to be killed is killed here, and the coordinator hears of its death only after the
fork server has waited for the process: nobody goes on beside one that may still write.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.elastic.coordinator import CoordinatorOrder
from paceline.elastic.events import MembershipEvent
from paceline.elastic.hosts.agent import Agent, AgentPlan
from paceline.elastic.hosts.job_stores import JobStores
from paceline.elastic.hosts.keeper import CoordinatorKeeper
from paceline.elastic.hosts.listening import listening_at
from paceline.elastic.member_process import run_member
from paceline.elastic.members import ElasticPolicy, MemberState
from paceline.elastic.protocol import ATTEMPT, DIRECTORY, HOSTS, MEMBER, coordinator_path
from paceline.elastic.stuck import StuckWatch, Watched, where_it_is
from paceline.launch import shutdown
from paceline.launch.environment import RankPlace, rank_environ
from paceline.launch.exits import exit_summary
from paceline.launch.job import Job, JobPlan
from paceline.launch.local_ranks import LocalRank, error_file, rank_streams
from paceline.launch.output import LogFile
from paceline.launch.rendezvous import JOIN_S, Endpoint, HostEnded
from paceline.launch.screen import Screen
from paceline.observe.private_file import open_private, write_whole
from paceline.observe.run_folder import RECORD_AS, RunFolder
from paceline.processes import host_name

_FAREWELL_S = 60.0  # for other hosts to finish
_STOP_S = 5.0  # for other hosts to hear that the job is told to end


@dataclass(frozen=True)
class ElasticPlan:
    """The options of ``paceline run --elastic``.

    Attributes:
        policy: What the coordinator decides by.
        maximum: More ranks than this are refused.
        stuck_after_s: A rank that is stopped or stuck for this long counts as dead; 0: never.
        lease_s: A host that is silent for this long counts as dead.
        key: Of the job; None: one is made.
    """

    policy: ElasticPolicy
    maximum: int
    stuck_after_s: float
    lease_s: float = 15.0
    key: bytes | None = field(default=None, repr=False)


class ElasticJob(Job):
    """The ranks of an elastic job on this host."""

    preload = (
        *Job.preload,
        "paceline.elastic.session",
        "paceline.elastic.epoch_store",
        "paceline.elastic.hosts.coordinator_process",
    )
    on_sigterm = staticmethod(shutdown.on_leave)

    def __init__(
        self, plan: JobPlan, folder: RunFolder, screen: Screen, elastic: ElasticPlan
    ) -> None:
        super().__init__(plan, folder, screen)
        self._elastic = elastic
        self._agent: Agent | None = None
        self._keeper: CoordinatorKeeper | None = None
        self._stores: JobStores | None = None
        self._members: dict[int, LocalRank] = {}
        self._kill_reasons: dict[int, str] = {}
        self._stuck = StuckWatch(folder, elastic.stuck_after_s)
        self._finished_s: float | None = None  # when nothing ran here any more, after the end
        self._is_told = False  # the ranks are told that the job is over
        self._stopped_by = ""  # why the first host ends after a step, until it has
        self._has_begun = False

    @property
    def _is_first_host(self) -> bool:
        return self._plan.hosts.number == 0

    @property
    def _is_alone(self) -> bool:
        return self._plan.hosts.count == 1

    # --- the loop ---------------------------------------------------------------------------------
    def _start_store(self) -> None:
        """Start all that is there before the ranks."""
        hosts = self._plan.hosts
        address = None if self._is_first_host else (hosts.endpoint.host, hosts.endpoint.port)
        self._agent = Agent(
            AgentPlan(
                hosts.number,
                hosts.count,
                hosts.local_world,
                self._elastic.key,
                address,
                self._elastic.lease_s,
            ),
            self,
            self._selector,
        )
        self._stores = JobStores(
            self._server,
            self._selector,
            hosts,
            self._agent.key,
            self._agent.directory,
            self._warn,
            self._on_store_port,
        )
        if self._is_first_host:
            agent = self._agent
            order = CoordinatorOrder(
                self._elastic.policy,
                agent.key,
                coordinator_path(agent.directory),
                None if self._is_alone else ("", hosts.endpoint.port),
                self._elastic.lease_s,
                self._elastic.maximum,
            )
            self._keeper = CoordinatorKeeper(
                self._server,
                order,
                self._selector,
                self._warn,
                give_up=agent.on_refused,
                is_over=lambda: agent.outcome is not None,
            )
        with contextlib.suppress(OSError):  # then nobody can scale it
            write_whole(self._folder.coordinator, str(self._agent.directory))

    def _on_store_port(self, store_port: int) -> None:
        """Other hosts reach the stores here."""
        if self._agent is not None and self._agent.store_port != store_port:
            self._agent.store_port = store_port
            self._agent.say("store", store_port=store_port)

    def on_store(self, store_port: int) -> None:
        """The first host's stores are behind this port."""
        if self._stores is not None and store_port:
            self._stores.aim_at(store_port)

    def _wait_once(self, limit_s: float | None = None) -> None:
        agent, keeper = self._agent, self._keeper
        waits = [limit_s, self._stuck.until_next_s()]
        waits += [each.until_next_s() for each in (agent, keeper) if each is not None]
        if self._finished_s is not None or (agent is not None and not agent.is_welcome):
            waits.append(1.0)
        super()._wait_once(min((wait for wait in waits if wait is not None), default=None))
        if agent is None or agent is not self._agent:
            return
        agent.tick()
        if keeper is not None:
            keeper.tick()
            if agent.silent_s > self._elastic.lease_s / 4:
                keeper.kill("it did not answer")
        self._judge(agent)
        self._kill_stuck(agent)

    def _judge(self, agent: Agent) -> None:
        """End, if the job is over, or the coordinator does not come back."""
        limit_s = self._elastic.policy.wait_s if self._has_begun else JOIN_S
        if agent.outcome is None and agent.away_s > limit_s:
            hosts = self._plan.hosts.endpoint
            agent.on_refused(
                f"the coordinator at {hosts.host}:{hosts.port} was not there for {limit_s:g} s"
            )
        if self._stopped_by and agent.outcome is None and not self._members:
            self.fail(self._stopped_by)  # ranks took too long, and were killed
            self._stopped_by = ""
        if agent.outcome and not self._is_told:
            self._is_told = True
            self._shutdown.begin(shutdown.on_terminate(self._plan.shutdown_s))
        if agent.outcome is not None and not self._members and self._finished_s is None:
            self._finished_s = time.monotonic()
            agent.say("finished")

    def _is_over(self) -> bool:
        if self._agent is None or self._members:
            return False if self._members else bool(self._signals)
        if self._signals:
            waited_s = (time.monotonic_ns() - self._signalled_ns) / 1e9
            is_heard = self._agent.has_said_all() or not self._agent.is_welcome
            return self._is_alone or is_heard or waited_s > _STOP_S
        if self._finished_s is None:
            return False
        is_last = self._is_alone or self._agent.is_over
        is_heard = not self._is_first_host and self._agent.has_said_all()
        return is_last or is_heard or time.monotonic() > self._finished_s + _FAREWELL_S

    def _on_signals(self, reader: Any) -> None:
        """Told to end: this host leaves, ranks after their step; with the first all hosts do."""
        before = len(self._signals)
        super()._on_signals(reader)
        agent = self._agent
        if agent is None or before or not self._signals:
            return
        is_gentle = self._signals[0] == signal.SIGTERM
        why = f"the first host got {signal.Signals(self._signals[0]).name}"
        if self._is_first_host and not is_gentle:
            self.fail(why)
        else:
            agent.say("leaving", why=why)
            self._stopped_by = why if self._is_first_host else ""
        if not is_gentle:
            agent.ranks.close()  # SIGTERM means to a rank what it usually means

    # --- what the coordinator asks for ------------------------------------------------------------
    def fork(self, order: dict[str, Any]) -> None:
        """Start a member, once the store is there that it needs."""
        assert self._stores is not None
        name = f"attempt-{order['attempt']}" if order["is_first"] else None
        self._stores.with_port(name, lambda port: self._start_member(order, port))

    def _start_member(self, order: dict[str, Any], port: int) -> None:
        assert self._agent is not None
        member, slot = int(order["member"]), int(order["slot"])
        if member not in self._agent.members or self._signals:
            self._agent.on_exit(member, f"rank {slot} was not started", is_quiet=False)
            return
        taken = {rank.place.local_rank for rank in self._members.values()}
        local = next(number for number in range(len(taken) + 1) if number not in taken)
        hosts, worlds = order["hosts"], tuple(order["worlds"])
        index = hosts.index(self._plan.hosts.number)
        where = RankPlace(slot, local, index, worlds)
        log = LogFile(self._folder.log(slot), self._warn)
        is_shown = self._plan.shown is None or local in self._plan.shown
        show = self._screen.show_lines if slot else self._screen.show
        streams = rank_streams(log, show if is_shown else None, slot)
        environ, target = self._member_environ(order, where, port), self._plan.target
        rank = LocalRank.start(self._server, where, target, environ, log, streams, run_member)
        self._members[member] = rank
        self._ranks.append(rank)
        self._watch(rank)

    def _member_environ(
        self, order: dict[str, Any], where: RankPlace, store: int
    ) -> dict[str, str]:
        """As torchrun sets it. Who joins later is alone at first, with a store of its own."""
        assert self._agent is not None
        slot = int(order["slot"])
        errors = error_file(str(self._folder.path.absolute()), slot)
        place = where if order["is_first"] else RankPlace(0, where.local_rank, 0, (1,))
        endpoint = Endpoint("localhost" if self._is_alone else "127.0.0.1", store)
        environ = self._environ | rank_environ(place, endpoint, self._plan.run_id, errors)
        if order["is_first"]:
            environ[ATTEMPT] = str(order["attempt"])
        else:
            environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": "0"}
        if not self._is_alone:
            environ[HOSTS] = str(self._plan.hosts.count)
        return environ | {
            DIRECTORY: str(self._agent.directory),
            MEMBER: str(order["member"]),
            RECORD_AS: str(slot),
        }

    def kill(self, member: int, why: str, *, at_once: bool = False) -> None:
        """Kill a member; the coordinator hears of its end later: [Note: fencing]."""
        rank = self._members.get(member)
        if rank is None or member in self._kill_reasons:
            return
        place = ""
        if not at_once:
            place, stacks = where_it_is(self._folder, rank.place.rank, rank.child.pid)
            if stacks:
                rank.log.write_traceback(f"{why}; its stacks:\n{stacks}\n")
        self._kill_reasons[member] = f"{why}, at {place}" if place else why
        rank.was_stopped = True
        rank.child.kill()

    def pid_of(self, member: int) -> int:
        """A member's process; 0 if it has none."""
        rank = self._members.get(member)
        return rank.child.pid if rank is not None else 0

    def listens(self) -> list[str]:
        """Where ranks of this host listen."""
        return listening_at(self.pid_of(member) for member in self._members)

    def on_epoch(self, event: dict[str, Any]) -> None:
        """Show and keep that an epoch has begun."""
        self._has_begun = True
        found = MembershipEvent(**event)
        if found.epoch:
            self._warn(found.describe())
        if self._is_first_host and self._agent is not None:
            here = {"host": host_name(), "pids": self._agent.pids_that_train()}
            line = {"at_s": time.time(), **asdict(found), **here}
            with (
                contextlib.suppress(OSError),
                os.fdopen(open_private(self._folder.membership, os.O_APPEND), "a") as file,
            ):
                file.write(json.dumps(line) + "\n")

    # --- what happens to members ------------------------------------------------------------------
    def _kill_stuck(self, agent: Agent) -> None:
        if not self._stuck.is_due():
            return
        found = [
            Watched(
                each.id,
                each.slot,
                self._members[each.id].child.pid,
                MemberState(each.state),
                agent.ranks.silent_s(each.id),
            )
            for each in agent.members.values()
            if each.id in self._members
        ]
        for member, why in self._stuck.judge(found, agent.has_all_ranks()).items():
            self.kill(member, why)
        if self._stuck.still:
            agent.say("still", ranks=self._stuck.still)
        agent.ranks.ping()

    def _on_ended(self, rank: LocalRank) -> None:
        member = next(number for number, each in self._members.items() if each is rank)
        del self._members[member]
        agent = self._agent
        why = self._describe(rank, self._kill_reasons.pop(member, ""))
        if agent is None:
            return
        is_quiet = rank.child.exit_code == 0 and not rank.was_stopped
        is_well = agent.outcome == ""
        agent.on_exit(member, why, is_quiet=is_quiet)
        if is_well and not rank.was_stopped:
            super()._on_ended(rank)
        elif not is_well and not self._signals:
            self._ranks.remove(rank)
            rank.close()

    def _describe(self, rank: LocalRank, kill_reason: str) -> str:
        where = "" if self._is_alone else f" on host {self._plan.hosts.number}"
        who = f"rank {rank.place.rank}{where} (pid {rank.child.pid})"
        if kill_reason:
            return f"{who} was killed: {kill_reason}"
        if rank.raised is not None and rank.raised.text:
            return f"{who} raised {rank.raised.text.splitlines()[0]}"
        if not rank.child.exit_code:
            return f"{who} ended"
        return f"{who} was {exit_summary(rank.child.exit_code)}".replace("was exited", "exited")

    # --- the end ----------------------------------------------------------------------------------
    def fail(self, why: str) -> None:
        """End the job."""
        if self._agent is not None and self._agent.is_welcome:
            self._agent.say("stop", why=why)
        elif self._agent is not None:
            self._agent.on_refused(why)

    def _conclude(self) -> int:
        agent = self._agent
        if agent is None or not agent.outcome or self._signals:
            return super()._conclude()
        self._write_failure(f"paceline run: {agent.outcome}\n")
        return 1

    def _tell_hosts(self, ended: HostEnded) -> None:
        """The coordinator does."""

    def _wait_for_hosts(self, ended: HostEnded) -> None:
        """They are not waited for here: see :meth:`_is_over`."""

    def _close(self) -> None:
        self._folder.coordinator.unlink(missing_ok=True)
        for each in (self._agent, self._keeper, self._stores):
            if each is not None:
                each.close()
        self._agent = None
        super()._close()
