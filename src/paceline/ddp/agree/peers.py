"""What ranks ask each other besides sums: the order of buckets, and what became of a step.

Every rank reads the same control block and comes to the same decision, so either all raise or none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.buckets import BucketCaps, BucketPlan, ParameterSpec
from paceline.config import ReducePolicy
from paceline.ddp.agree.control import ControlBlock, Flag
from paceline.ddp.agree.diagnosis import build_error
from paceline.ddp.agree.drift import Drift
from paceline.ddp.agree.hook_futures import HookFutures
from paceline.ddp.agree.init_sync import verify_same_model, verify_same_plan
from paceline.ddp.agree.out_of_step import OutOfStep
from paceline.ddp.agree.replicas import ReplicaCheck
from paceline.ddp.agree.reports import FailureReport
from paceline.errors import DesynchronizedError, GroupClosedError, StepError
from paceline.forks import Owner, keep_for_ever
from paceline.liveness import watch_of
from paceline.torch_private.groups import group_timeout
from paceline.transport.exchange import broadcast_integers, gather_json
from paceline.types import Transport


class Decision(enum.Enum):
    """What to do with the step."""

    APPLY = enum.auto()
    """The gradients are good."""

    SKIP = enum.auto()
    """A rank's gradients are not finite, and nonfinite="skip": all gradients become zero."""


class Peers:
    """The other ranks of a group, seen from this one."""

    def __init__(
        self, group: dist.ProcessGroup, transport: Transport, device: torch.device
    ) -> None:
        self._group = group
        self._transport = transport
        self._device = device
        self._rank = group.rank()
        self._owner = Owner()
        self._out_of_step = OutOfStep(self._rank)

    def hook_futures(self) -> HookFutures:
        """Return how long to wait for hooks: as long as a collective of the group may take."""
        timeout = group_timeout(self._group) or dist.default_pg_timeout
        return HookFutures(watch_of(self._group), timeout.total_seconds())

    def check_process(self) -> None:
        """Raise GroupClosedError in a forked child: it has no peers."""
        if self._owner.is_here():
            return
        raise GroupClosedError(
            f"This wrapper belongs to rank {self._rank}, process {self._owner.pid}, and was used "
            "in a child that was forked from it. A child has no part in the training: run "
            "ddp.module there, or make a group and a wrapper of its own, or start workers with "
            "the 'spawn' or 'forkserver' method.",
            rank=self._rank,
        )

    def let_go(self) -> None:
        """In a forked child: the group's threads are not here, so that it must never end."""
        keep_for_ever(self._group)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the group, this one too, in the numbers of the default group."""
        return tuple(dist.get_process_group_ranks(self._group))

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Take the order of rank 0, so that all ranks cut the same buckets."""
        what = "agreement on the order of buckets"
        return broadcast_integers(self._transport.messages, what, order, self._device)

    def check_model(
        self, specs: Sequence[ParameterSpec], policy: ReducePolicy, caps: BucketCaps
    ) -> None:
        """Raise ModelMismatchError on every rank if some rank has another model or settings."""
        verify_same_model(self._transport.messages, specs, policy, caps, self._device)

    def check_plan(self, plan: BucketPlan) -> None:
        """Raise ModelMismatchError on every rank if some rank has another plan."""
        verify_same_plan(self._transport.messages, plan, self._device)

    def decide(
        self,
        block: ControlBlock,
        failure: FailureReport | None,
        policy: ReducePolicy,
        drift: Drift,
        replicas: ReplicaCheck | None = None,
    ) -> Decision:
        """Decide about a step.

        ``drift`` knows what this rank did since the last one, ``replicas`` what it holds.

        Raises:
            StepError: If the step failed on some rank; the same error on every rank.
        """
        if block.is_ordinary():
            if failure is not None:
                # It came to light after the block was sent: the peers may be fine.
                raise self.error_for([failure], policy)
            return Decision.APPLY
        self._check_steps(block)
        self._check_weights(block)
        if block.any(Flag.FAILED):
            mine = failure.to_json() if failure else None
            what = "exchange of failure reports"
            answers = gather_json(self._transport.messages, what, mine, self._device)
            reports = [FailureReport.from_json(answer) for answer in answers if answer is not None]
            raise self.error_for(reports, policy)
        self._out_of_step.check(block, drift.last, self._exchange_tallies)
        if replicas is not None:
            replicas.check(block, self._exchange_checksums)
        return Decision.SKIP if block.any(Flag.NONFINITE) else Decision.APPLY

    def _exchange_tallies(self, mine: list[int]) -> list[Any]:
        what = "comparison of what ranks did"
        return gather_json(self._transport.messages, what, mine, self._device)

    def _exchange_checksums(self, mine: dict[str, str] | None) -> list[Any]:
        what = "comparison of parameters"
        return gather_json(self._transport.messages, what, mine, self._device)

    def error_for(self, reports: Sequence[FailureReport], policy: ReducePolicy) -> StepError:
        """Return the error that these reports amount to."""
        return build_error(reports, policy)

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
            unweighted = [rank for rank, row in block.present() if not row.has(Flag.WEIGHTED)]
            raise DesynchronizedError(
                f"Ranks {weighted} ran this backward inside `ddp.weighted(n)`, ranks {unweighted} "
                "did not, so there is no common mean. Use `with ddp.weighted(n):` on every rank; "
                "n = 0 is fine.",
                rank=unweighted[0],
            )
