"""Are ranks in the same step? Said from what the control block has of every rank.

Raises only for what proves that ranks' parameters differ: a false alarm in training that is right
is worse than a missed one. ``docs/drift.md`` has the table of signs, and why each raises, warns or
says nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from paceline.ddp.agree.control import ControlBlock
from paceline.ddp.agree.drift import Tally
from paceline.errors import DesynchronizedError

Gather = Callable[[Any], list[Any]]


class OutOfStep:
    """Compares what ranks did between two synchronised backward passes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_warned = False

    def check(self, block: ControlBlock, mine: Tally, gather: Gather) -> None:
        """Compare; ``gather`` exchanges a value with all ranks, joined ones included.

        Raises:
            DesynchronizedError: If ranks have updated their parameters differently.
        """
        rows = [(rank, row.drift.to_bytes(4, "little")) for rank, row in block.present()]
        steps, updates, unsynced, left_out = zip(*(code for _, code in rows), strict=True)
        if _differ(unsynced) or (_differ(steps) and _differ(updates)):
            told = [Tally(*counts) for counts in gather(list(mine))]
            ranks = [rank for rank, _ in rows]
            text = _text({rank: told[rank] for rank in ranks})
            if any(row.step for _, row in block.present()):
                counts = unsynced if _differ(unsynced) else [-count for count in updates]
                raise DesynchronizedError(text, rank=_odd_one(ranks, counts))
            self._warn(text)  # before the first common step a rank may have tried something out
        elif min(left_out) == 0 and max(left_out) > 1:  # Tally.code: none raised; 1 + left out
            self._warn(_raised_text([(rank, code[3] - 1) for rank, code in rows if code[3] > 1]))

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=2)


def _differ(counts: Sequence[int]) -> bool:
    return min(counts) != max(counts)


def _odd_one(ranks: Sequence[int], counts: Sequence[int]) -> int:
    """The first rank with the rarest count, or the highest: likely the one that did otherwise."""
    rarest = min(counts, key=lambda count: (counts.count(count), -count))
    return ranks[counts.index(rarest)]


def _text(tallies: dict[int, Tally]) -> str:
    told = "\n".join(f"  rank {rank}: {_account(tally)}" for rank, tally in tallies.items())
    return (
        "Ranks are out of step: since the last synchronised backward they have not updated their "
        f"parameters alike.\n{told}\n"
        "So gradients of different steps were averaged with each other now, and the ranks' "
        "parameters differ. Likely causes: `no_sync()`, `ddp.module(x)` or a skipped "
        "optimizer.step() on some ranks only, or an exception that one of them caught. Let every "
        "rank do the same between two optimizer steps; then start from a checkpoint, or wrap the "
        "module in a new DistributedDataParallel, which gives all ranks the parameters of rank 0."
    )


def _account(tally: Tally) -> str:
    parts = [_number(tally.forwards, "forward")]
    if tally.raised:
        parts.append(f"{tally.raised} of them raised")
    if tally.local:
        parts.append(f"{_number(tally.local, 'backward')} under no_sync")
    if tally.bypassed:
        parts.append(f"{_number(tally.bypassed, 'backward')} past the wrapper (ddp.module)")
    parts.append(f"{_number(tally.updates, 'update')} of the parameters")
    if tally.unsynced:
        parts.append(f"{tally.unsynced} of them with gradients that were never averaged")
    return ", ".join(parts)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _raised_text(raised: Sequence[tuple[int, int]]) -> str:
    told = ", ".join(f"rank {rank}: {_number(count, 'forward')}" for rank, count in raised)
    return (
        "A forward raised on some ranks only, and was caught, since the last synchronised backward "
        f"({told}). If the batch was left out there, that rank's batches are averaged with earlier "
        "ones of the others from now on, and it will be done with its data first: let every rank "
        "leave out a step, or use `with ddp.join():`. If the batch was run again, all is well. "
        "This is said once."
    )
