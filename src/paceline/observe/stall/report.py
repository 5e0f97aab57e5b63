"""The stall report: one sentence that names the culprit, a line for each rank, stacks.

Made from what was seen of the ranks (:mod:`paceline.observe.stall.views`), for the watchdog and for
``paceline doctor``.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Any

from paceline.observe.membership import MembershipChange, read_membership
from paceline.observe.records import Activity
from paceline.observe.run_folder import WHO_RECORDS, RunFolder
from paceline.observe.stall.views import (
    RankView,
    behind,
    by_age,
    members,
    missing_ranks,
    still_training,
)
from paceline.printable import listed, printable
from paceline.processes import ProcessState

_MAX_CHARACTERS = 1 << 20
_LONG_WAIT_S = 1.0
_UNUSUAL = 2.0
"""A wait is long if it is so many times as long as a usual one."""
_GONE = (ProcessState.DEAD, ProcessState.STOPPED)
_GIL = "its Python does not run: native code holds the GIL, or the process gets no CPU"


def name_culprit(views: Sequence[RankView]) -> str:
    """Say in one sentence who keeps the others waiting, and what it does instead."""
    late = behind(views)
    if not late:
        return _nobody(views)
    here = members(views) if _somebody_waits(views) else still_training(views)
    return printable(f"{_accuse(late[0], here)}{_others(late[1:])}", 1000)


def _somebody_waits(views: Sequence[RankView]) -> bool:
    return any(view.is_waiting for view in members(views))


def _nobody(views: Sequence[RankView]) -> str:
    if not views:
        return "No rank has recorded anything yet."
    missing = missing_ranks(views)
    if missing:
        told = f"{'Rank' if len(missing) == 1 else 'Ranks'} {listed(missing, 8)}"
        keep, record = ("keeps", "records") if len(missing) == 1 else ("keep", "record")
        return (
            f"{told} {keep} the others waiting, it seems: all ranks that record into this folder "
            f"wait for others, and {told.lower()} {record} elsewhere. Run `paceline doctor` on "
            "their host, or look at the network between the hosts."
        )
    return (
        "All ranks wait in the same collective, and none of them is behind: look at the network "
        "between the hosts, or for a rank that has recorded nothing."
    )


def _accuse(view: RankView, views: Sequence[RankView]) -> str:
    where, at = view.where, f", at {view.place}" if view.place else ""
    since = f" for {view.age_s:.1f} s" if view.age_s >= 0 else ""
    step = f" in step {view.status.step}" if view.status.step else ""
    if view.state is ProcessState.DEAD:
        return f"{_capital(view.name)} is dead; it was {where}{step}{_last_words(view)}."
    if view.state is ProcessState.STOPPED:
        return (
            f"{_capital(view.name)} is stopped (SIGSTOP, Ctrl-Z or a debugger), {where}{since}"
            f"{step}; `kill -CONT {view.info.pid if view.info else 'PID'}` lets it go on."
        )
    if view.is_waiting:
        call = view.account.collective if view.account is not None else ""
        return (
            f"{_capital(view.name)} waits in another collective than the others: "
            f"{call or where}{at}; all ranks must call the same collectives in the same order."
        )
    why = f" ({_GIL})" if view.is_silent else ""
    if view.account is not None and view.account.locks:
        why = f"; {view.account.locks}"
    if len(views) > 1 and not _somebody_waits(views):
        return (
            f"No rank waits for another; {view.name} has been longest in one thing: "
            f"{where}{since}{step}{at}{why}."
        )
    verb = "keeps the others waiting: it has been" if len(views) > 1 else "has been"
    return f"{_capital(view.name)} {verb} {where}{since}{step}{at}{why}."


def _last_words(view: RankView) -> str:
    return f" ({view.status.detail})" if view.status.detail else ""


def _others(late: Sequence[RankView]) -> str:
    if not late:
        return ""
    told = ", ".join(f"rank {view.rank} ({view.where})" for view in late[:5])
    return f" Also behind: {told}{' and more' if len(late) > 5 else ''}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- all of it -----------------------------------------------------------------------------------


def report_text(
    views: Sequence[RankView], title: str = "", more: str = "", *, most: int | None = None
) -> str:
    """Return the whole report.

    Args:
        views: What is known of the ranks.
        title: Before the sentence that names the culprit.
        more: After it.
        most: How many stacks, and collectives of how many ranks; None: all.
    """
    late = _suspects(views)
    others = [view for view in views if view not in late]
    lines = [f"{title}{name_culprit(views)}{more}", "", *_table(views)]
    lines += _collectives([*late, *others], most)
    stacks = _stacks(late)
    for ranks, stack in stacks[:most]:
        lines += ["", f"  {ranks}: {stack}"]
    left_out = len(stacks) - len(stacks[:most])
    if left_out:
        lines += ["", f"  and {left_out} more stack{'s' if left_out > 1 else ''} in the file"]
    return printable("\n".join(lines), _MAX_CHARACTERS)


def _suspects(views: Sequence[RankView]) -> list[RankView]:
    """Who is behind; if nobody waits, all that are at work."""
    if _somebody_waits(views):
        return behind(views)
    return by_age(still_training(views))


def _collectives(views: Sequence[RankView], most: int | None) -> list[str]:
    lines = []
    for view in [v for v in views if v.account is not None and v.account.collectives][:most]:
        assert view.account is not None
        lines += ["", f"  last collectives of rank {view.rank}, newest first:"]
        lines += [f"    {each}" for each in view.account.collectives]
    return lines


def _stacks(views: Sequence[RankView]) -> list[tuple[str, str]]:
    """Return the stacks, each with the ranks that have it: often many are at the same line."""
    ranks: dict[str, list[int]] = {}
    for view in views:
        ranks.setdefault(_stack(view), []).append(view.rank)
    return [
        (f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}", stack)
        for stack, found in ranks.items()
    ]


def _stack(view: RankView) -> str:
    if view.stack:
        by = "by signal, most recent call first" if view.account is None else "its threads"
        return f"stack ({by})\n{textwrap.indent(view.stack, '    ')}"
    return {
        ProcessState.DEAD: "no stack: it is dead. Its log, and the kernel's, may say why.",
        ProcessState.STOPPED: "no stack: a process that is stopped cannot be asked.",
        ProcessState.UNKNOWN: "no stack: it is on another host and did not answer.",
    }.get(view.state, "no stack: it did not answer.")


def _table(views: Sequence[RankView]) -> list[str]:
    rows: list[tuple[str, ...]] = [("rank", "pid", "host", "process", "step", "doing", "for")]
    rows += [_row(view) for view in views]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[5] = 0  # the longest text comes last
    table = []
    for row in rows:
        order = (0, 1, 2, 3, 4, 6)
        cells = [row[column].ljust(widths[column]) for column in order]
        table.append(f"  {'  '.join(cells)}  {row[5]}".rstrip())
    return table


def _row(view: RankView) -> tuple[str, ...]:
    age = f"{view.age_s:.1f} s" if view.age_s >= 0 else "?"
    pid, host = (str(view.info.pid), view.info.host) if view.info is not None else ("?", "?")
    step = str(view.status.step)
    return str(view.rank), pid, host, view.state.value, step, _doing(view), age


def _doing(view: RankView) -> str:
    account = view.account
    parts = [view.where]
    if account is not None:
        parts += [each for each in (account.collective, account.awaited, account.locks) if each]
    if view.is_silent:
        parts.append("computes in native code" if view.computes else "blocked in native code")
    if view.place:
        parts.append(f"at {view.place}")
    return "; ".join(parts)


def report_json(views: Sequence[RankView]) -> dict[str, Any]:
    """Return the same for programs."""
    late = {view.rank for view in behind(views)}
    return {
        "culprit": name_culprit(views),
        "stalled": is_stalled(views),
        "ranks": [_as_json(view, is_behind=view.rank in late) for view in views],
    }


def _as_json(view: RankView, *, is_behind: bool) -> dict[str, Any]:
    account = view.account
    return {
        "rank": view.rank,
        "pid": view.info.pid if view.info is not None else None,
        "host": view.info.host if view.info is not None else None,
        "process": view.state.value,
        "step": view.status.step,
        "activity": view.status.activity.name.lower(),
        "where": view.where,
        "place": view.place,
        "for_s": round(view.age_s, 3) if view.age_s >= 0 else None,
        "standing": view.standing.value,
        "is_behind": is_behind,
        "is_waiting": view.is_waiting,
        "answers": account is not None,
        "collective": account.collective if account is not None else "",
        "awaited": account.awaited if account is not None else "",
        "collectives": list(account.collectives) if account is not None else [],
        "locks": account.locks if account is not None else "",
        "stack": view.stack,
    }


def is_stalled(views: Sequence[RankView]) -> bool:
    """Whether a rank waits that no healthy step keeps waiting, or one is dead or stopped."""
    here = members(views)
    if is_ended(views):
        return False
    lost = [view for view in still_training(views) if view.state in _GONE]
    return bool(lost) or any(_waits_long(view) for view in here)


def _waits_long(view: RankView) -> bool:
    usual_s = view.account.usual_wait_s if view.account is not None else 0.0
    return view.is_waiting and view.age_s > max(_LONG_WAIT_S, _UNUSUAL * usual_s)


def is_ended(views: Sequence[RankView]) -> bool:
    """Whether a job is over: no process of it is left, as far as can be seen."""
    return bool(views) and all(
        view.state is ProcessState.DEAD or view.status.activity is Activity.ENDED for view in views
    )


def _how_it_ended(views: Sequence[RankView]) -> str:
    """A job that is over has nobody who waits: who ended with an error, or without a word?"""
    here = members(views)
    bad = [view for view in here if view.status.detail or view.status.activity != Activity.ENDED]
    if not bad:
        return "the job is over; all ranks ended in order."
    told = (
        f"rank {view.rank} was {view.where}{_last_words(view)}; its log is rank{view.rank}.log"
        for view in bad
    )
    return printable("the job is over, and not in order.\n  " + "\n  ".join(told), 10_000)


def describe_run(folder: RunFolder, views: Sequence[RankView]) -> str:
    """What a run does now, for a person: a report, with a word on whether anything is wrong."""
    path, changed = folder.path, _changed(read_membership(folder.membership))
    if not views:
        return f"{path}: no rank has recorded anything. {WHO_RECORDS}."
    if is_ended(views):
        return f"{path}: {_how_it_ended(views)}{changed}\n\n" + "\n".join(_table(views))
    title = "" if is_stalled(views) else "Nothing stalls at this moment. "
    return report_text(views, title, changed)


def _changed(changes: Sequence[MembershipChange]) -> str:
    """How an elastic job came to have the ranks that it has."""
    if not changes:
        return ""
    newest = changes[-1]
    ranks = f"{newest.world} rank{'s' if newest.world > 1 else ''}"
    at = time.strftime("%H:%M:%S", time.localtime(newest.at_s))
    if newest.epoch == 0:
        return f"\n  elastic: {ranks} since {at}; nobody has left or joined"
    count = f"{newest.epoch} change{'s' if newest.epoch > 1 else ''} of membership"
    return (
        f"\n  elastic: {count}; {ranks} since {at}, from step {newest.step} on, because "
        f"{printable(newest.why, 300)}"
    )
