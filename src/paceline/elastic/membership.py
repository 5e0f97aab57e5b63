"""Who trains, and when: the coordinator's decisions, without a socket, a process or a clock.

Called by :mod:`paceline.elastic.coordinator`, which hands in what happened and carries out the
actions that come back. Pure, so that every order of events can be tried out in a test.

[Note: the life of an epoch]
    gather   members come to ``train(state)`` and wait. The first epoch begins when all are there.
    train    nothing is said: no message, no vote.
    end      a member died, or somebody is to join or to leave. Those that train are told: ``End``
             after a death, and they leave their collective at once; ``Regroup`` otherwise, and they
             leave together after a step that all of them finish: once the first has left, the
             others are told which (``End`` with ``after``). If one of them dies before, they cannot
             finish it, and are told to leave at once.
    ready    each says which step it has committed, and whether it stands exactly there; also who
             was done already: a place in the next epoch is given to those only that have left.
    begin    when all that live are ready: the next epoch has its ranks, and a source, whose state
             is copied to those that do not stand where it stands.

[Note: the source]
A member is *clean* if no optimizer has stepped since its commit. Of the clean ones, one with the
highest committed step is the source: the step is complete there, and nothing that was committed is
lost. A step needs all ranks, so the others are at most one behind. If nobody is clean, a collective
between ``optimizer.step()`` and ``commit()`` has failed: that step can be neither completed nor
undone, and to do it again would apply it twice. Then the job ends, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.elastic.hosts.takeover import Takeover
from paceline.elastic.members import (
    Action,
    Begin,
    Kill,
    Member,
    MemberState,
    Regroup,
    Release,
    best_of,
)
from paceline.elastic.roster import INSIDE, OUTSIDE, Roster, Slot


@dataclass
class Membership(Roster):
    """The members of one job."""

    is_finished: bool = False
    _ended_s: float | None = None  # since when no epoch is under way, after the first
    _lost_s: float | None = None  # when a member died that is not replaced yet
    _begin_step: int = -1
    _lost_slots: set[int] = field(default_factory=set)  # of those that died in this epoch
    _broken: int = 0  # epochs in a row that ended with a failed collective, before a step
    _is_regrouping: bool = False  # ranks were asked to leave after a step, and none has
    _is_finishing: bool = False  # some have, and the others finish the same step
    _last_death: str = ""
    _scale_to: int | None = None

    # --- what happens -----------------------------------------------------------------------------
    def start(self) -> list[Action]:
        """Begin the job on one host."""
        return self.on_host(0, self.policy.ranks)

    def on_host(self, host: int, ranks: int) -> list[Action]:
        """A host is there, for the first time or again, and nothing runs on it."""
        self.hosts.put(host, ranks)
        if self.epoch < 0:
            return self._try_start()
        self._count_ranks()
        return self._top_up() + self._fork_spares() + self._go_on()

    def on_host_lost(self, host: int, why: str) -> list[Action]:
        """A host is gone, and what ran there has ended."""
        self.hosts.known[host].is_up = False
        dead = [who for who in self.members.values() if who.host == host]
        for who in dead:
            del self.members[who.id]
        if self._is_over or not dead:
            return []
        self._last_death = why
        if self.epoch < 0:
            return self._start_again(why)
        self._lost_s = self.now_s
        self._lost_slots |= {who.slot for who in dead if who.state in INSIDE}
        actions: list[Action] = []
        if any(who.state in INSIDE for who in dead) and self._may_step():
            actions = self._end_epoch(why)
        return actions + self._top_up() + self._fork_spares() + self._go_on()

    def on_host_leaving(self, host: int | None) -> list[Action]:
        """A host is told to end, with some time to do so: its ranks leave after their step.

        None: all are, and whoever has the highest committed step saves it.
        """
        leaving = [who.id for who in self.members.values() if host in (None, who.host)]
        if self.epoch < 0 and host is None:
            return self._fail("the job was told to end")
        if self.epoch < 0 and host is not None:
            return self.on_host_lost(host, f"host {host} was told to end") if leaving else []
        for number in [host] if host is not None else [*self.hosts.known]:
            del self.hosts.known[number]
        self._count_ranks()
        return [a for m in leaving if m in self.members for a in self.on_leave(m)]

    def resume(self, found: Takeover) -> list[Action]:
        """Take over from a coordinator that is gone: [Note: taking over]."""
        self.epoch, self.is_started, self._last_death = found.epoch, True, found.why
        # Somebody may have asked while launchers had not reported yet.
        scaled_to = (self._scale_to if self.epoch >= 0 else None) or found.scaled_to
        self.is_scaled = scaled_to > 0
        if self.is_scaled:
            self.policy = replace(self.policy, ranks=scaled_to)
        self._count_ranks()
        members, is_whole, why = found.members, found.is_whole, found.why
        self.members = {who.id: who for who in members}
        for who in members:
            self._slots.setdefault(who.slot, Slot())
        if self.epoch < 0:
            return self._go_on() if is_whole else self._start_again(why)
        self._begin_step = max((who.step for who in self.inside()), default=-1)
        ends: list[Action] = []
        if not is_whole:
            self._ended_s = self._lost_s = self.now_s
            ends = self._tell_to_leave(why)
        return ends + self._shed(self.policy.ranks) + self._go_on()

    def on_joined(self, member: int) -> list[Action]:
        """A member has come to ``train(state)`` and waits."""
        self.members[member].state = MemberState.WAITING
        return self._go_on()

    def on_ready(self, member: int, step: int, is_clean: bool) -> list[Action]:
        """A member has left its epoch; -1: it has no whole state, its copy was cut short."""
        who = self.members[member]
        who.state = MemberState.READY if step >= 0 else MemberState.WAITING
        who.step, who.is_clean = step, is_clean
        ends: list[Action] = []
        # The first to leave: from now on nobody can complete a step. It may have been asked to by a
        # coordinator that is gone.
        if self._is_regrouping or self._ended_s is None:
            self._is_regrouping, self._is_finishing, self._ended_s = False, True, self.now_s
            ends = self._tell_to_leave("ranks are to join or to leave", step)
        if step < 0 and who.is_leaving:
            ends.append(self._release(who))  # it holds nothing, and nobody waits for it
        return ends + self._go_on()

    def on_done(self, member: int, step: int) -> list[Action]:
        """``train(state)`` has returned on a member."""
        who = self.members[member]
        who.step, who.is_clean = step, True
        if self._ended_s is None or self._is_regrouping:
            who.state = MemberState.DONE
        return self._go_on()  # otherwise it has been told to leave, and will say that it has

    def on_died(self, member: int, why: str) -> list[Action]:
        """A member's process is gone, for whatever reason."""
        who = self.members.pop(member, None)
        if who is None or self._is_over:
            return []
        if self.epoch < 0:
            return self._begin_again(who, why)
        was_in = who.state in INSIDE
        actions: list[Action] = []
        if not who.is_leaving:
            actions += self._replace(who, was_in)
        if was_in and self._may_step():
            actions += self._end_epoch(why)
        self._last_death = why
        return actions + self._go_on()

    def on_broken(self, member: int, why: str) -> list[Action]:
        """A member's collective has failed, and nobody has died: a connection is lost."""
        if self.members[member].state is not MemberState.TRAINING or not self._may_step():
            return []
        self._broken += 1
        if self._broken >= self.policy.early_deaths:
            return self._fail(f"{why}; {self._broken} times in a row without a step in between")
        self._last_death = why
        return self._end_epoch(why) + self._go_on()

    def on_leave(self, member: int) -> list[Action]:
        """A member was told to end, with some time to do so. It goes after its step."""
        who = self.members[member]
        if who.is_terminated:
            return []
        who.is_leaving = who.is_terminated = True
        if self.epoch < 0:
            return []  # it ends at once, and all begin again
        actions: list[Action] = []
        if not who.is_spare and len(self._staying()) + self._due() < self._minimum():
            actions += self._fill(self._free_slot())
        if who.state in OUTSIDE:
            actions.append(self._release(who))
            actions += self._fork_spares()
        return actions + self._go_on()

    def on_scale(self, ranks: int) -> list[Action]:
        """Somebody wants another number of ranks."""
        self.is_scaled = True
        if self.epoch < 0:
            self._scale_to = ranks  # those that begin together are on their way
            return []
        self.policy = replace(self.policy, ranks=ranks)
        return self._shed(ranks) + self._go_on()

    def on_tick(self, now_s: float) -> list[Action]:
        """Time has passed. Call it when :meth:`next_due_s` is reached."""
        self.now_s = max(self.now_s, now_s)
        actions: list[Action] = []
        for number, slot in self._slots.items():
            if slot.fork_at_s is not None and self.now_s >= slot.fork_at_s:
                slot.fork_at_s = None
                if slot.is_spare or self._is_short():
                    actions += self._fork(number, is_spare=slot.is_spare)
        if not self.is_started:
            actions += self._try_start()
        return actions + self._judge_silent() + self._go_on()

    def next_due_s(self) -> float | None:
        """When something is to be done even if nothing happens."""
        due = [slot.fork_at_s for slot in self._slots.values() if slot.fork_at_s is not None]
        if not self.is_started:
            due.append(self._gather_from_s + self.policy.gather_s)
        if self._ended_s is not None:
            due.append(self._ended_s + self.policy.respond_s)
            due.append(self._ended_s + self.policy.wait_s)
            if self._lost_s is not None:
                due.append(self._lost_s + self.policy.hold_s)
        later = [at_s for at_s in due if at_s > self.now_s]
        return min(later, default=None)

    # --- what follows -----------------------------------------------------------------------------

    def _begin_again(self, dead: Member, why: str) -> list[Action]:
        """Before the first epoch nothing is committed, and the set-up of all has failed: once more.

        The members that are still there are killed, and their deaths no longer count. Those that
        began alone lose nothing.
        """
        if not self.policy.replaces:
            return self._fail(f"{why} before the first step, and nobody replaces it")
        slot = self._slots.setdefault(dead.slot, Slot())
        slot.early_deaths += 1
        if slot.early_deaths >= self.policy.early_deaths:
            return self._fail(
                f"rank {dead.slot} died {slot.early_deaths} times before the first step; "
                f"the last time: {why}"
            )
        if self.policy.begins_alone:
            return self._fork(dead.slot, prefer=dead.host)
        self._slots = {n: s for n, s in self._slots.items() if n < self.policy.ranks}
        return self._start_again(f"rank {dead.slot} died")

    def _replace(self, dead: Member, was_in: bool) -> list[Action]:
        slot = self._slots.setdefault(dead.slot, Slot())
        slot.early_deaths += 1  # until it turns out that its epoch had a step: see _begin
        if was_in:
            self._lost_slots.add(dead.slot)
        if slot.early_deaths >= self.policy.early_deaths:
            return self._fail(
                f"rank {dead.slot} died {slot.early_deaths} times in a row without a step "
                f"in between; the time before: {self._last_death}"
            )
        if not dead.is_spare:
            self._lost_s = self.now_s
        if slot.early_deaths >= 2:
            slot.is_spare = dead.is_spare
            slot.fork_at_s = self.now_s + self.policy.first_pause_s * 2 ** (slot.early_deaths - 2)
            return []
        if dead.is_spare or not self._is_short():
            return self._fork_spares()
        return self._fill(dead.slot, prefer=dead.host)

    def _may_step(self) -> bool:
        """Whether some may wait for a step to be complete: they were not told to leave at once."""
        return self._ended_s is None or self._is_regrouping or self._is_finishing

    def _end_epoch(self, why: str) -> list[Action]:
        self._ended_s, self._is_regrouping, self._is_finishing = self.now_s, False, False
        return self._tell_to_leave(why)

    def _judge_silent(self) -> list[Action]:
        """Kill those that were told that their epoch is over and have not left it.

        Nobody while ranks are asked to leave after a step: a step may take as long as it likes.
        """
        if (
            self._ended_s is None
            or self._is_regrouping
            or self.now_s < self._ended_s + self.policy.respond_s
        ):
            return []
        silent = [w for w in self.members.values() if w.state is MemberState.TRAINING]
        why = f"it did not leave its step for {self.policy.respond_s:g} s after its epoch had ended"
        return [Kill(who.id, why) for who in silent]

    def _go_on(self) -> list[Action]:
        """Begin an epoch, ask for one, or end the job, if it is time."""
        if self._is_over:
            return []
        inside = self.inside()
        if self.epoch < 0:
            waiting = [w for w in self.members.values() if w.state is MemberState.WAITING]
            return self._begin_first(waiting) if len(waiting) == self.policy.ranks else []
        if inside and all(who.state is MemberState.DONE for who in inside):
            return self._finish()
        if self._ended_s is None:
            if self._wants_change() and not any(w.state is MemberState.DONE for w in inside):
                self._ended_s, self._is_regrouping = self.now_s, True
                return [Regroup(w.id) for w in inside]
            return []
        return self._try_begin(inside)

    def _wants_change(self) -> bool:
        all_members = self.members.values()
        if any(who.is_leaving and who.is_training for who in all_members):
            return self._may_leave()
        return any(who.state is MemberState.WAITING and not who.is_spare for who in all_members)

    def _try_begin(self, inside: list[Member]) -> list[Action]:
        if any(who.state is MemberState.TRAINING for who in inside):
            return []
        stay = [who for who in self._staying() if who.state is not MemberState.STARTING]
        ended_s = self._ended_s if self._ended_s is not None else self.now_s
        lost_s = self._lost_s if self._are_replaced() else None
        is_held = lost_s is not None and self.now_s < lost_s + self.policy.hold_s
        if len(stay) < self.policy.ranks and is_held:
            return []
        if inside and not any(who.is_clean for who in inside):
            return self._fail(
                f"{self._last_death}, while all others were between optimizer.step() and "
                f"state.commit() of step {max(who.step for who in inside) + 1}: that step can be "
                "neither completed nor undone. Call state.commit() directly after the optimizer's "
                "step, and collectives (of metrics, for example) after it"
            )
        if inside and len(stay) >= self._minimum():
            return self._begin(stay)
        if inside and not stay and not self._are_replaced():
            return self._finish(best_of(inside))
        if not inside:
            return self._fail(
                "all ranks died, and nobody holds the state any more; the last that was heard: "
                f"{self._last_death}"
            )
        if self.now_s >= ended_s + self.policy.wait_s:
            return self._fail(
                f"there are {len(stay)} ranks, fewer than the minimum of {self.policy.minimum}, "
                f"for {self.policy.wait_s:g} s"
            )
        return []

    def _begin_first(self, waiting: list[Member]) -> list[Action]:
        actions = [*self._begin(waiting), *self._fork_spares()]
        if self._scale_to is not None:
            return actions + self.on_scale(self._scale_to)
        self._count_ranks()  # hosts that came too late to begin together
        return actions + self._top_up()

    def _begin(self, stay: list[Member]) -> list[Action]:
        is_first = self.epoch < 0 and not self.policy.begins_alone
        inside = self.inside()
        best = best_of(inside)
        if best is not None and best.is_leaving:
            stay = [*stay, best]  # nobody else has its step: it hands over first
        gone = [who for who in inside if who.is_leaving and who is not best]
        order = sorted(stay, key=lambda who: (who.slot, who.id))
        step = best.step if best else 0
        source = order.index(best) if best is not None else 0
        copies = not is_first and any(
            who.state is MemberState.WAITING or who.step != step or not who.is_clean
            for who in order
        )
        if step > self._begin_step:
            self._broken = 0
            for number in self._slots.keys() & self._lost_slots | {who.slot for who in inside}:
                self._slots[number].early_deaths = 0
        self._lost_slots.clear()
        self._is_finishing = False
        self.epoch, self._ended_s, self._lost_s, self._begin_step = self.epoch + 1, None, None, step
        for who in order:
            who.state, who.step, who.is_clean = MemberState.TRAINING, step, True
        begins: list[Action] = [
            Begin(who.id, self.epoch, rank, len(order), source, step, copies, is_first)
            for rank, who in enumerate(order)
        ]
        releases: list[Action] = [self._release(who) for who in gone]
        return [*begins, *releases, *self._go_on()]

    def _finish(self, saves: Member | None = None) -> list[Action]:
        """The job is over: it is done, or nobody goes on."""
        self._is_over = self.is_finished = True
        found = [self._release(who) for who in list(self.members.values())]
        if saves is None:
            return found
        return [replace(a, saves=True) if a == Release(saves.id) else a for a in found]
