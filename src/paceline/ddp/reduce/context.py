"""What all parts of a reducer work with.

Made by the reducer, and replaced as a whole when the policy or the group changes. Holds no bucket
and no step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config import ReducePolicy
from paceline.ddp.agree.peers import Peers
from paceline.ddp.agree.replicas import ReplicaCheck
from paceline.ddp.reduce.arrivals import UsageMap
from paceline.ddp.reduce.comm_hook import RegisteredHook
from paceline.ddp.reduce.shard_sums import ShardSums
from paceline.errors import HookAlreadyRegisteredError
from paceline.observe import StepClock
from paceline.types import Transport


@dataclass
class Registrations:
    """What users have registered: it outlives plans and groups.

    Attributes:
        hook: A communication hook, which takes the place of the reduction.
        sparse_rows: Which rows a sparse gradient may have, by parameter name.
        futures: The end of the next step waits for these.
    """

    hook: RegisteredHook | None = None
    sparse_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    futures: list[torch.futures.Future[Any]] = field(default_factory=list)

    def register_hook(self, hook: RegisteredHook) -> None:
        """Let a hook take the place of the reduction.

        Raises:
            HookAlreadyRegisteredError: If there is one.
        """
        if self.hook is not None:
            raise HookAlreadyRegisteredError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: the "
                f"communication hook {self.hook.name} is registered already, so {hook.name} cannot "
                "be. To combine two, write a hook that calls both."
            )
        self.hook = hook


@dataclass(frozen=True)
class ReduceContext:
    """Policy, group, and what is kept from step to step."""

    policy: ReducePolicy
    transport: Transport
    peers: Peers
    usage: UsageMap
    clock: StepClock
    registered: Registrations
    on_error: Callable[[BaseException], None]
    replicas: ReplicaCheck | None = None
    shards: ShardSums | None = None

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook takes the place of the reduction."""
        return self.registered.hook is not None
