"""``elastic.run``: train, and go on when the membership changes.

Wraps the user's function. It is called again with the same state in every epoch, so it must begin
where the state stands: ``for epoch in range(state.epoch, epochs)``, and a loader over an
:class:`~paceline.elastic.DistributedSampler`, which knows where it is.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from paceline.elastic.client import CoordinatorClient
from paceline.elastic.epoch_store import is_on_several_hosts, open_store
from paceline.elastic.epoch_watch import watch_epoch
from paceline.elastic.events import MembershipEvent
from paceline.elastic.hosts.listening import listening_at
from paceline.elastic.protocol import DIRECTORY
from paceline.elastic.state import State
from paceline.elastic.supervised.own_stand_in import ask_for_stand_in
from paceline.elastic.supervised.supervise import find_supervisor, leave_supervisor
from paceline.elastic.unblock import free_collectives
from paceline.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigurationError,
    MembershipError,
)
from paceline.hooks.round_scheduler import close_schedulers
from paceline.torch_private.groups import default_group, restart_group_names, set_group_timeout

logger = logging.getLogger("paceline.elastic")

P = ParamSpec("P")
R = TypeVar("R")

CONNECT_S = 1.0
"""gloo's time-out while ranks connect, once all have come to the store; more if that was too short.

For the connection of a rank that has died meanwhile gloo waits five times as long, and cannot be
woken (measured with torch 2.13).
"""
_LONGER = 4

MEET_S = 30.0
"""Who has not come to the store for so long, after others have, is stuck and counts as dead."""

LEAVE_S = 10.0
"""How long collectives may take to end, once their connections are cut."""


_TOLD_TO_END = (
    "rank %d was told to end, and leaves after step %d%s.%s Launchers that end all ranks when one "
    "dies (torchrun, mp.spawn with join) do that; with `paceline run --elastic`, or with `-m "
    "paceline.elastic.stand_in` under torchrun, the others go on"
)


_ended_in: set[str] = set()  # directories of jobs that have ended well in this process
_ONE_FUNCTION = (
    "a function under @elastic.run has returned, and with it the elastic job has ended: paceline "
    "run starts replacements for one such function. Do both parts in one, and let the state say "
    "which is due"
)


class EpochOver(Exception):
    """Raised in ``state.commit()`` when ranks are to join or to leave. Not an error."""


def run(train: Callable[Concatenate[State, P], R]) -> Callable[Concatenate[State, P], R]:
    """Make a training function survive deaths, joins and departures of ranks.

    Started by ``paceline run --elastic`` it also gets replacements. Elsewhere the ranks of one host
    get a supervisor, and survivors go on; a rank alone, or ranks of several hosts, just train.
    """

    ask_for_stand_in()

    @functools.wraps(train)
    def wrapper(state: State, *args: P.args, **kwargs: P.kwargs) -> R:
        if os.environ.get(DIRECTORY) in _ended_in:
            raise ConfigurationError(_ONE_FUNCTION)
        is_supervised = DIRECTORY not in os.environ and find_supervisor()
        session = Session(state, is_supervised=is_supervised)
        if session.client is None:
            return train(state, *args, **kwargs)
        try:
            return session.run(lambda: train(state, *args, **kwargs))
        except BaseException as error:
            session.has_failed = not isinstance(error, SystemExit) or bool(error.code)
            raise
        finally:
            session.close()

    return wrapper  # type: ignore[return-value]  # the name of the first argument


def _check(state: State) -> None:
    """Refuse what would go wrong later, when ranks change.

    Raises:
        ConfigurationError: Say so now.
    """
    for wrapper in state.wrappers:
        if dist.get_world_size(wrapper.process_group) != dist.get_world_size():
            raise ConfigurationError(
                "a model of the state averages over a group that has not all ranks: elastic "
                "training makes the default group anew, and no other. Leave process_group out"
            )
        if any(hasattr(each, "_in_backward_optimizers") for each in wrapper.module.parameters()):
            raise ConfigurationError(
                "parameters of the state step in the backward, bucket by bucket: if a rank dies in "
                "the middle of that, the step can be neither completed nor undone. Take a step "
                "after the backward"
            )


class Session:
    """One call of a training function: its epochs."""

    def __init__(self, state: State, *, is_supervised: bool = False) -> None:
        self.has_failed = False  # this rank, and not the job: others may go on
        self._is_supervised = is_supervised
        self._state = state
        self._pids: list[int] = []
        self._listens: set[str] = set()
        self._rank = self._epoch = self._failures = 0
        self._entered_s: float | None = None  # until the change of membership is told
        self._tells = False
        self._backend = dist.get_backend() if dist.is_initialized() else "gloo"
        self.client = CoordinatorClient.from_environment(lambda: state.commits, self._free)

    def run(self, train: Callable[[], R]) -> R:
        """Train through all epochs; return what the function returns in the last."""
        client, state = self.client, self._state
        assert client is not None
        _check(state)
        state.after_commit = self._check_regroup
        watch_epoch(lambda: client.is_over)
        decision = client.join()
        while True:
            if decision["kind"] == "release":
                self._say_farewell(decision)
                raise SystemExit(0)
            try:
                self._enter(decision)
                result = train()
                self._tell()
                if client.done(state.commits):
                    _ended_in.add(os.environ[DIRECTORY])
                    return result
            except EpochOver:
                pass
            except BaseException as error:
                if not self._is_of_membership(error):
                    raise
            decision = self._leave()

    def _say_farewell(self, decision: dict[str, Any]) -> None:
        """This rank was asked to leave. If nobody goes on, one writes a checkpoint, if any does."""
        state = self._state
        where = state.save_last() if decision.get("saves") else ""
        if self._is_supervised:
            saved = f", which is saved in {where}" if where else ""
            why = f" Its epoch was over because {decision['why']}." if decision.get("why") else ""
            logger.warning(_TOLD_TO_END, self._rank, state.commits, saved, why)
        elif where:
            logger.warning("rank %d has saved step %d in %s", self._rank, state.commits, where)
        else:
            logger.info("this rank leaves the job")

    # --- between two epochs -----------------------------------------------------------------------
    def _is_of_membership(self, error: BaseException) -> bool:
        """Whether an error is a consequence of the epoch's end, and not the user's."""
        assert self.client is not None
        if self.client.is_over:
            return isinstance(error, Exception)
        is_collective = isinstance(error, (RuntimeError, ConnectionError, TimeoutError))
        if not is_collective or self.client.wait_over():
            return is_collective
        return _is_of_the_link(error) and self.client.broken(
            f"rank {self._rank} lost a connection: {str(error).splitlines()[0]}"
        )

    def _leave(self) -> dict[str, Any]:
        client, state = self.client, self._state
        assert client is not None
        self._tell()
        noticed_s = time.monotonic() - client.ended_s if client.ended_s else 0.0
        if not close_schedulers(LEAVE_S):  # before what hooks remember is put back
            raise MembershipError(
                f"a collective of a communication hook has not ended for {LEAVE_S:g} s after its "
                "group was aborted"
            )
        state.put_back()
        began_s = time.monotonic()
        decision = client.ready(state.commits if state.is_whole else -1, state.is_clean)
        decision |= {"noticed": noticed_s, "agreed": time.monotonic() - began_s}
        return decision

    def _enter(self, decision: dict[str, Any]) -> None:
        """Take a place in an epoch: rebuild the group, copy the state."""
        state = self._state
        rank, world, epoch = decision["rank"], decision["world"], decision["epoch"]
        self._rank, self._epoch = rank, epoch
        self._tells = rank == decision["source"]  # who joins knows nothing of what came before
        self._pids = [pid for pid in decision["pids"] if pid != os.getpid()]
        began_s = time.monotonic()
        if not decision["is_first"]:
            if rank != decision["source"] and not state.holds_step:
                state.is_whole = False  # until the copy is complete
            self._rebuild(epoch, rank, world)
            state.count_from(decision["step"])
        if is_on_several_hosts():
            self._tell_listens(open_store(epoch, world), rank, world)
        rebuilt_s = time.monotonic()
        state.take_place(rank, world)
        if decision["copies"]:
            state.copy_from(decision["source"], decision["step"])
        state.has_entered()
        event = MembershipEvent(
            epoch,
            decision.get("why", ""),
            rank,
            world,
            decision["step"],
            decision.get("noticed", 0.0),
            decision.get("agreed", 0.0),
            rebuilt_s - began_s,
            time.monotonic() - rebuilt_s,
        )
        state.events.append(event)
        self._entered_s = time.monotonic()

    def _tell(self) -> None:
        """Log the change of membership, once its first step is committed or cannot be any more."""
        entered_s, self._entered_s = self._entered_s, None
        if entered_s is None or self.client is None:
            return
        events = self._state.events
        if self._state.commits > events[-1].step:
            events[-1] = replace(events[-1], first_step_s=time.monotonic() - entered_s)
        # The launcher shows it, if there is one.
        is_shown = self._is_supervised and self._tells and events[-1].epoch > 0
        logger.log(logging.WARNING if is_shown else logging.INFO, "%s", events[-1].describe())
        if self._tells:
            self.client.entered(asdict(events[-1]))

    def _rebuild(self, epoch: int, rank: int, world: int) -> None:
        for wrapper in self._state.wrappers:
            wrapper._transport.close()
        free_collectives(self._state.wrappers, self._pids, self._listens)
        if dist.is_initialized():
            dist.destroy_process_group()
        store = open_store(epoch, world)
        self._meet(store, rank, world)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        self._connect(store, rank, world)
        set_group_timeout(default_group(), dist.default_pg_timeout)
        for wrapper in self._state.wrappers:
            wrapper._update_process_group(dist.group.WORLD)

    def _connect(self, store: Any, rank: int, world: int) -> None:
        # An attempt that failed has counted: names of groups would not be those of a joiner.
        restart_group_names()
        limit = datetime.timedelta(seconds=CONNECT_S * _LONGER**self._failures)
        began_s = time.monotonic()
        try:
            dist.init_process_group(
                self._backend, store=store, rank=rank, world_size=world, timeout=limit
            )
        except RuntimeError as error:
            assert self.client is not None
            # One that failed sooner was not too short. Backends leave a thread behind, with gloo's
            # sockets, that waits for so long.
            is_late = time.monotonic() - began_s >= limit.total_seconds()
            self._failures += is_late and not self.client.is_over
            raise ConnectionError(f"the group could not be made: {error}") from error
        self._failures = 0

    def _tell_listens(self, store: Any, rank: int, world: int) -> None:
        """Learn where all ranks listen, while they can be reached: see unblock.py."""
        self._meet(store, rank, world, "listens", json.dumps(listening_at([os.getpid()])))
        found = [json.loads(store.get(f"listens/{each}")) for each in range(world) if each != rank]
        self._listens = {str(end) for ends in found for end in ends}

    def _meet(self, store: Any, rank: int, world: int, what: str = "here", text: str = "") -> None:
        """See all ranks at the store before any of them waits inside of gloo."""
        assert self.client is not None
        store.set(f"{what}/{rank}", text)
        keys = [f"{what}/{each}" for each in range(world)]
        late_s = time.monotonic() + MEET_S
        while not store.check(keys):
            if self.client.is_over:
                raise ConnectionError("a rank died before the new group was made")
            if time.monotonic() >= late_s:
                late_s = time.monotonic() + MEET_S
                late = [each for each in range(world) if not store.check([keys[each]])]
                self.client.missing(self._epoch, late)
            time.sleep(0.01 if is_on_several_hosts() else 0.001)

    # --- called by others -------------------------------------------------------------------------
    def _check_regroup(self) -> None:
        assert self.client is not None
        self.client.check_lease()
        if self._entered_s is not None:
            self._tell()
        if self.client.is_regrouping or self.client.is_over:
            raise EpochOver

    def _free(self) -> None:
        free_collectives(self._state.wrappers, self._pids, self._listens)

    def close(self) -> None:
        """Leave the job."""
        watch_epoch(None)
        if self.client is not None:
            self.client.close()
        if self._is_supervised:
            leave_supervisor(has_failed=self.has_failed)
        self._state.after_commit = None


def _is_of_the_link(error: BaseException) -> bool:
    """Whether an error is of the connections between ranks, and not of what was asked for."""
    if isinstance(error, (CollectiveMismatchError, CollectiveTimeoutError)):
        return False
    return isinstance(error, (CollectiveError, ConnectionError, dist.DistError)) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )
