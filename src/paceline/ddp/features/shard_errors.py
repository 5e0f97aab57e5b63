"""What a loop over shards must be, and the errors that say what it was instead.

Called by the loop. Each shard is one forward and one backward: what is more, or less, would have
other gradients at another number of ranks.
"""

from __future__ import annotations

import torch

from paceline.config import Shards
from paceline.ddp.reduce.shard_sums import ONE_BACKWARD
from paceline.errors import ConfigurationError


def check_begin(policy: Shards, rank: int, *, syncs: bool) -> None:
    """See that a round can begin: what bits depend on is as it was."""
    threads = torch.get_num_threads()
    if threads != policy.threads:
        raise ConfigurationError(
            f"Rank {rank}: torch uses {threads} threads, but its shards are pinned to "
            f"{policy.threads}, because kernels change their bits with it. Leave "
            "torch.set_num_threads alone, or give DistributedDataParallel "
            f"shards=paceline.Shards({policy.count}, threads={threads})."
        )
    if not syncs:
        raise ConfigurationError(
            f"Rank {rank}: no_sync() and shards exclude each other. A round over shards is always "
            "reduced, and is added to the gradients that are there: to accumulate, run several "
            "rounds before optimizer.step()."
        )


def check_forwards(rank: int, shard: int, found: int) -> None:
    """See that a shard ran one."""
    if found != 1:
        raise ConfigurationError(
            f"Rank {rank}, shard {shard}: the loop over shards has run {found} forwards with "
            "gradients through the wrapper. Each shard is one forward and one backward; use "
            "torch.no_grad() for everything else."
        )


def check_backwards(rank: int, shard: int, found: int, *, may_be_none: bool) -> None:
    """The same for backward passes that brought gradients."""
    if found > 1 or not (found or may_be_none):
        raise ConfigurationError(
            f"Rank {rank}, shard {shard}: the loop over shards has run {found or 'no'} backward "
            f"passes that brought gradients. {ONE_BACKWARD}"
        )


def check_weight(rank: int, weight: float | None, *, is_other: bool, in_turns: bool) -> None:
    """See that a shard may have this weight; ``is_other``: unlike the first."""
    if weight is not None and in_turns:
        raise ConfigurationError(
            f"Rank {rank}: weighted(n) and a SyncBatchNorm over shards exclude each other: the "
            "backward mixes what shards bring, before it can be weighted. Multiply each shard's "
            "loss with n V / sum(n) of all V shards instead."
        )
    if is_other:
        raise ConfigurationError(
            f"Rank {rank}: some shards of a round are inside of weighted(n), and some are not. "
            "Use it for all, or for none."
        )
    if weight is not None and weight != int(weight):
        raise ConfigurationError(
            f"Rank {rank}: weighted({weight}) with shards: take whole numbers, such as samples or "
            "tokens, whose sum is exact in any order."
        )


def outside_of_loop(rank: int, shards: int) -> ConfigurationError:
    """A forward with gradients has begun there."""
    return ConfigurationError(
        f"Rank {rank}: a wrapper with shards={shards} is trained inside of "
        "`for micro in ddp.shards(batch):`. Run evaluations under torch.no_grad()."
    )


def update_inside_of_loop(rank: int, owned: range) -> ConfigurationError:
    """An optimizer is about to step there."""
    return ConfigurationError(
        f"Rank {rank}: optimizer.step() before the loop over shards {owned.start} to "
        f"{owned.stop - 1} has run to its end: gradients are complete after the backward of the "
        "last one. Call it after the loop."
    )


def needs_run_shards(rank: int) -> ConfigurationError:
    """A loop cannot give layers all shards at once."""
    return ConfigurationError(
        f"Rank {rank}: SyncBatchNorm needs all shards at once, but this loop runs them one after "
        "the other. Give what it does to ddp.run_shards(batch, function), which runs them in "
        "turns; or use BatchNorm, whose statistics are the shard's own."
    )
