"""What ranks ask each other besides sums: the order of buckets, and what became of a step.

Every rank reads the same control block and comes to the same verdict, so either all raise or none.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from paceline.buckets import BucketPlan
from paceline.config import ReducePolicy
from paceline.ddp.control import ControlBlock, Flag
from paceline.ddp.diagnosis import build_error
from paceline.ddp.init_sync import verify_same_plan
from paceline.ddp.reports import FailureReport
from paceline.errors import CollectiveError, DesynchronizedError, PacelineError, StepError
from paceline.transport.exchange import broadcast_integers, gather_json


class Verdict(enum.Enum):
    """What to do with the step."""

    APPLY = enum.auto()
    """The gradients are good."""

    SKIP = enum.auto()
    """A rank's gradients are not finite, and nonfinite="skip": all gradients become zero."""


class Peers:
    """The other ranks of a group, seen from this one."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rank = group.rank()

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Take the order of rank 0, so that all ranks cut the same buckets."""
        with self._talking("agreement on the order of buckets"):
            return broadcast_integers(self._group, order, self._device)

    def check_plan(self, plan: BucketPlan) -> None:
        """Raise ModelMismatchError on every rank if some rank has another plan."""
        with self._talking("comparison of buckets"):
            verify_same_plan(self._group, plan, self._device)

    def judge(
        self, block: ControlBlock, failure: FailureReport | None, policy: ReducePolicy
    ) -> Verdict:
        """Decide about a step.

        Raises:
            StepError: If the step failed on some rank; the same error on every rank.
        """
        if block.is_plain():
            if failure is not None:
                # It came to light after the block was sent: the peers may be fine.
                raise self.error_for([failure], policy)
            return Verdict.APPLY
        self._check_steps(block)
        self._check_weights(block)
        if block.any(Flag.FAILED):
            mine = failure.to_json() if failure else None
            with self._talking("exchange of failure reports"):
                answers = gather_json(self._group, mine, self._device)
            reports = [FailureReport.from_json(answer) for answer in answers if answer is not None]
            raise self.error_for(reports, policy)
        return Verdict.SKIP if block.any(Flag.NONFINITE) else Verdict.APPLY

    def error_for(self, reports: Sequence[FailureReport], policy: ReducePolicy) -> StepError:
        """Return the error that these reports amount to."""
        return build_error(reports, policy)

    @contextlib.contextmanager
    def _talking(self, operation: str) -> Iterator[None]:
        """Give a group that fails an error of ours."""
        try:
            yield
        except PacelineError:
            raise
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self._rank}: {operation} failed: {error}\nA peer has probably died. Look "
                "at the logs of the other ranks; the group cannot be used further.",
                rank=self._rank,
                operation=operation,
            ) from error

    def _check_steps(self, block: ControlBlock) -> None:
        steps = {row.step for _, row in block.present()}
        if len(steps) > 1:
            told = ", ".join(f"rank {rank}: step {row.step}" for rank, row in block.present())
            raise DesynchronizedError(
                f"Ranks reduced gradients of different steps with each other ({told}). One of them "
                "left out a backward that the others ran, for example after an exception. Let "
                "every rank run the same number of backward passes, or use `with ddp.join():` for "
                "uneven inputs.",
                rank=self._rank,
            )

    def _check_weights(self, block: ControlBlock) -> None:
        weighted = [rank for rank, row in block.present() if row.has(Flag.WEIGHTED)]
        if weighted and len(weighted) != len(block.present()):
            plain = [rank for rank, row in block.present() if not row.has(Flag.WEIGHTED)]
            raise DesynchronizedError(
                f"Ranks {weighted} ran this backward inside `ddp.weighted(n)`, ranks {plain} did "
                "not, so there is no common mean. Use `with ddp.weighted(n):` on every rank; n = "
                "0 is fine.",
                rank=plain[0],
            )
