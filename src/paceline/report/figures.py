"""Coordinates of the page's drawings, as shares of their width. Pure; called by page.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.analysis import Analysis, RankTimes, ReportedChange
from paceline.report.buckets import BucketSummary
from paceline.report.phases import Phase, to_ms
from paceline.report.steps import JobStep

HEAT_CELLS = 96
# Phases in the order in which a bar shows them, after the words of the style sheet.
BAR = (
    (Phase.INPUT, "input"),
    (Phase.FORWARD, "forward"),
    (Phase.LOSS, "loss"),
    (Phase.BACKWARD, "backward"),
)


@dataclass(frozen=True)
class Piece:
    """One coloured piece of a bar; ``at`` and ``width`` in percent."""

    kind: str
    label: str
    ms: float
    at: float
    width: float


def rank_bar(rank: RankTimes, longest_ms: float) -> list[Piece]:
    """Where a rank's time goes in the mean step."""
    parts = [(kind, kind, rank.own[phase]) for phase, kind in BAR]
    parts += [
        ("lost", "waiting for ranks", rank.lost),
        ("exposed", "communication", rank.exposed + rank.own[Phase.REDUCTION]),
        ("optimizer", "optimizer", rank.own[Phase.OPTIMIZER]),
    ]
    pieces, at = [], 0.0
    for kind, label, ms in parts:
        width = 100 * ms / longest_ms if longest_ms else 0.0
        pieces.append(Piece(kind, label, ms, round(at, 3), round(width, 3)))
        at += width
    return pieces


def total_ms(rank: RankTimes) -> float:
    """The mean step of a rank."""
    return sum(rank.own.values()) + rank.lost + rank.exposed


@dataclass(frozen=True)
class Cell:
    """Some steps of one rank: how long the others waited for it, in the mean step."""

    at: float
    width: float
    level: int
    ms: float
    first: int
    last: int


def heat_rows(steps: Sequence[JobStep], ranks: Sequence[int]) -> dict[int, list[Cell]]:
    """The blame of each rank over time; levels 0 to 9 by its share of the steps."""
    size = max(1, -(-len(steps) // HEAT_CELLS))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    return {
        rank: [_cell(rank, group, at, len(groups)) for at, group in enumerate(groups)]
        for rank in ranks
    }


def _cell(rank: int, group: Sequence[JobStep], at: int, cells: int) -> Cell:
    mine = [step for step in group if rank in step.ranks]
    lost = sum(step.ranks[rank].blame_ns for step in mine)
    others = sum(len(step.ranks) - 1 for step in mine)
    took = sum(step.duration_ns * (len(step.ranks) - 1) for step in mine)
    part = lost / took if took else 0.0
    return Cell(
        at=round(100 * at / cells, 3),
        width=round(100 / cells, 3),
        level=min(9, round(9 * min(1.0, part * 2) ** 0.6)) if part > 0.005 else 0,
        ms=to_ms(lost / others) if others else 0.0,
        first=group[0].number,
        last=group[-1].number,
    )


@dataclass(frozen=True)
class Span:
    """How many ranks took part from one change of membership to the next; all in percent."""

    change: ReportedChange
    at: float
    width: float
    height: float


def membership_spans(analysis: Analysis) -> list[Span]:
    """How many ranks took part over time; nothing if the job is not elastic."""
    changes = analysis.membership
    if not changes:
        return []
    began = changes[0].at_s
    ended = max(began + 0.001, analysis.duration_s, *(change.at_s for change in changes))
    most = max(change.world for change in changes) or 1
    ends = [*(change.at_s for change in changes[1:]), ended]
    return [
        Span(
            change,
            at=_percent(change.at_s - began, ended - began),
            width=_percent(end - change.at_s, ended - began),
            height=_percent(change.world, most),
        )
        for change, end in zip(changes, ends, strict=True)
    ]


@dataclass(frozen=True)
class BucketBar:
    """A bucket in the median step: computed until ready, waiting, then reduced."""

    bucket: BucketSummary
    ready: float
    began: float
    reduce_at: float
    reduce_width: float
    exposed_at: float
    exposed_width: float


def bucket_bars(analysis: Analysis) -> tuple[float, list[BucketBar]]:
    """Return where backward ends, in percent, and the bar of every bucket."""
    backward = analysis.overlap.backward_ms
    ends = [bucket.ended_ms for bucket in analysis.buckets]
    longest = max([backward, *ends, 0.001])
    bars = []
    for bucket in analysis.buckets:
        reduce_ms = min(bucket.reduce_ms, bucket.ended_ms)
        exposed_ms = min(bucket.exposed_ms, reduce_ms)
        bars.append(
            BucketBar(
                bucket,
                _percent(bucket.ready_ms, longest),
                _percent(bucket.began_ms, longest),
                _percent(bucket.ended_ms - reduce_ms, longest),
                _percent(reduce_ms, longest),
                _percent(bucket.ended_ms - exposed_ms, longest),
                _percent(exposed_ms, longest),
            )
        )
    return _percent(backward, longest), bars


def _percent(part: float, whole: float) -> float:
    return round(100 * max(0.0, part) / whole, 3)
