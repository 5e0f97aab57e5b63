"""Records of a job whose ranks come and go: one history for each place, whoever had it.

Called by run.py for jobs that have a membership file. A place keeps its number, and its file, when
a new process takes it; the file of the process before is kept beside it. Must not know what is made
of the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.observe.membership import MembershipChange, Standing, standing_of
from paceline.observe.records import RankHistory
from paceline.observe.ring import read_history
from paceline.observe.run_folder import RunFolder


def join_former(folder: RunFolder, histories: Sequence[RankHistory]) -> list[RankHistory]:
    """Put the records of the process before in front of each; leave out who never trained."""
    joined = [_join(history, _former(folder, history)) for history in histories]
    return [history for history in joined if history.steps] or list(histories)


def current_members(
    histories: Sequence[RankHistory], changes: Sequence[MembershipChange]
) -> list[RankHistory]:
    """Those that were to be there at the end: the others may have been killed, and all is well."""
    return [
        history
        for history in histories
        if standing_of(history.info, changes, is_gone=True) is Standing.MEMBER
    ]


def lost_records(
    folder: RunFolder, histories: Sequence[RankHistory], changes: Sequence[MembershipChange]
) -> list[str]:
    """Say of which places more processes have trained than there are records of."""
    found = []
    for history in histories:
        rank = history.info.rank
        here = [c.pids for c in changes if c.pids is not None and c.host == history.info.host]
        pids = {members[rank] for members in here if rank in members}
        former = _former(folder, history)
        lost = pids - {history.info.pid} - ({former.info.pid} if former else set())
        if lost:
            found.append(
                f"Rank {rank} has had {len(pids)} processes; records of {len(lost)} of them are "
                "not kept."
            )
    return found


def _former(folder: RunFolder, history: RankHistory) -> RankHistory | None:
    try:
        found = read_history(folder.former_events(history.info.rank))
    except (OSError, ValueError):
        return None
    is_other = found.info.pid != history.info.pid and found.info.host == history.info.host
    return found if is_other and found.info.rank == history.info.rank else None


def _join(history: RankHistory, former: RankHistory | None) -> RankHistory:
    if former is None:
        return history
    until_ns = history.steps[0].began_ns if history.steps else None
    before = [s for s in former.steps if until_ns is None or s.reduced_ns <= until_ns]
    known = {record.step for record in history.steps}  # taken back and done again
    kept = tuple(record for record in before if record.step not in known)
    buckets = history.info.buckets or former.info.buckets
    return replace(
        history,
        info=replace(history.info, buckets=buckets),
        steps=kept + history.steps,
        notes=former.notes + history.notes,
    )
