"""Who failed first, and the one block of text that says so.

Called by ``job.py`` when a rank has failed. Pure: it is given how each rank ended.

[Note: culprit and victims]
When one rank dies, the others fail because of it, often within milliseconds. The culprit is found
in this order:
1. PeerLostError, PeerFailedError and CollectiveTimeoutError name another rank; so may that one's;
   the end of that chain is the culprit, even if it is a rank that ended with code 0, or
   still runs because it is stopped.
2. Else, of the ranks that failed, one whose exception does not look like a lost connection.
3. Else the first in time: of its exception, or of its end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.launch.exits import exit_summary
from paceline.launch.script import Raised
from paceline.printable import printable_line

TAIL_LINES = 12
_TAIL_CHARACTERS = 400
_TRACEBACK_LINES = 60
_NAMED_RANKS = 8
# What c10d's backends say when a peer has gone.
_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset|refused|was likely closed)|Broken pipe|[Ss]ocket|"
    r"Timed out waiting|NCCL (remote|communicator)|failed to (recv|send)",
)


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, as far as the launcher knows.

    Attributes:
        exit_code: As in subprocess; None if it runs still.
        ended_ns: When; 0 if it runs still.
        was_stopped: The launcher ended it, after another had failed.
        raised: Its exception, if one ended it.
        tail: The last lines of its log.
        note: What the launcher knows besides, for example that memory ran out.
        last_seen: What it did by its records, if it could not say anything: ``in forward``.
    """

    rank: int
    pid: int
    exit_code: int | None
    ended_ns: int
    was_stopped: bool
    raised: Raised | None
    log: str
    tail: Sequence[str] = ()
    note: str = ""
    last_seen: str = ""

    @property
    def has_failed(self) -> bool:
        """It ended by itself, and badly."""
        return not self.was_stopped and self.exit_code not in (None, 0)

    @property
    def failed_ns(self) -> int:
        """When that began."""
        return self.raised.at_ns if self.raised is not None else self.ended_ns

    @property
    def looks_like_a_victim(self) -> bool:
        """Its exception is about somebody else."""
        raised = self.raised
        if raised is None:
            return False
        return (
            raised.lost_pid > 0
            or raised.lost_rank >= 0
            or bool(_LOST_CONNECTION.search(raised.text))
        )

    def describe(self) -> str:
        """In a line."""
        if self.raised is not None and self.raised.text:
            return self.raised.text
        if self.exit_code is None or self.was_stopped:
            return "did not fail itself, and the others waited for it"
        if self.exit_code == 0:
            return "ended (exit code 0) while others still needed it"
        return exit_summary(self.exit_code) + (f": {self.note}" if self.note else "")


@dataclass(frozen=True)
class Failure:
    """A job that failed on this host.

    Attributes:
        culprit: The rank that failed first.
        others: The rest, in rank order.
    """

    culprit: RankEnd
    others: tuple[RankEnd, ...]

    @property
    def exit_status(self) -> int:
        """What the launcher exits with: the culprit's, 128 + n for signal n."""
        codes = [end.exit_code or 0 for end in (self.culprit, *self.others) if not end.was_stopped]
        code = next((code for code in codes if code), 1)
        return code if code > 0 else 128 - code

    def headline(self) -> str:
        """Which rank, and why, in a line."""
        first = self.culprit.describe().splitlines()[0]
        return f"rank {self.culprit.rank} (pid {self.culprit.pid}) failed first: {first}"

    def block(self) -> str:
        """All that the terminal shows about it."""
        culprit = self.culprit
        lines = [f"paceline run: {self.headline()}", *self._details()]
        if culprit.last_seen:
            lines.append(f"  it was last seen {culprit.last_seen}")
        if culprit.tail:
            lines.append(f"  the last lines that it wrote ({culprit.log}):")
            tail = (printable_line(line, _TAIL_CHARACTERS) for line in culprit.tail[-TAIL_LINES:])
            lines += [f"    | {line}".rstrip() for line in tail]
        else:
            lines.append(f"  it wrote nothing ({culprit.log})")
        if self.others:
            lines.append(f"  because of that: {self._consequences()}")
        return "\n".join(lines) + "\n"

    def _details(self) -> list[str]:
        """The traceback, which has the message again; without one, the rest of the message."""
        raised = self.culprit.raised
        if raised is None or not raised.traceback:
            return [f"    {line}" for line in self.culprit.describe().splitlines()[1:]]
        lines = raised.traceback.rstrip().splitlines()
        if len(lines) > _TRACEBACK_LINES:
            head, tail = _TRACEBACK_LINES // 3, 2 * _TRACEBACK_LINES // 3
            left_out = f"  ... {len(lines) - head - tail} lines, all of them in its log ..."
            lines = [*lines[:head], left_out, *lines[-tail:]]
        return [f"  {line}".rstrip() for line in lines]

    def _consequences(self) -> str:
        kinds: dict[str, list[int]] = {}
        for end in self.others:
            too = ", too" if _is_same(end, self.culprit) else ""
            kinds.setdefault(_consequence(end) + too, []).append(end.rank)
        parts = [f"{_ranks(ranks)} {what}" for what, ranks in kinds.items()]
        return "; ".join([*parts, _logs([end.log for end in self.others])])


def find_failure(ends: Sequence[RankEnd]) -> Failure | None:
    """Find the culprit: [Note: culprit and victims]. None if no rank has failed."""
    failed = [end for end in ends if end.has_failed]
    if not failed:
        return None
    first = min(failed, key=lambda end: (end.looks_like_a_victim, end.failed_ns))
    culprit = _follow(first, ends)
    return Failure(culprit, tuple(end for end in ends if end is not culprit))


def _follow(end: RankEnd, ends: Sequence[RankEnd]) -> RankEnd:
    seen = [end]
    while end.raised is not None:
        raised = end.raised
        blamed = [e for e in ends if raised.lost_pid == e.pid or raised.lost_rank == e.rank]
        if not blamed or blamed[0] in seen:
            break
        end = blamed[0]
        seen.append(end)
    return end


def _consequence(end: RankEnd) -> str:
    if end.was_stopped or end.exit_code is None:
        return "stopped by the launcher"
    if end.raised is not None and end.raised.text:
        return "raised " + re.split(r"[:\s]", end.raised.text, maxsplit=1)[0].rpartition(".")[2]
    return exit_summary(end.exit_code) if end.exit_code else "ended"


def _is_same(end: RankEnd, culprit: RankEnd) -> bool:
    """For example all ranks have found no file."""
    if end.raised is None or culprit.raised is None:
        return False
    return end.raised.text == culprit.raised.text


def _ranks(ranks: list[int]) -> str:
    """For example ``ranks 0, 1, 3``; many are not listed."""
    if len(ranks) > _NAMED_RANKS:
        return f"{len(ranks)} ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _logs(paths: Sequence[str]) -> str:
    """Where to read more; the folder of the culprit's log is theirs too."""
    names = [os.path.basename(path) for path in paths]
    if len(names) == 1:
        return f"its log is {names[0]}"
    if len(names) > _NAMED_RANKS:
        return f"their logs are in {os.path.dirname(paths[0]) or '.'}"
    return "their logs are " + ", ".join(names)
