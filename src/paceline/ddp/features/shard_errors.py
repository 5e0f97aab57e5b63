"""What a loop over shards must be, and the errors that say what it was instead.

Called by the loop. Each shard is one forward and one backward: what is more, or less, would have
other gradients at another number of ranks.
"""

from __future__ import annotations

import torch

from paceline.config import Shards
from paceline.ddp.reduce.shard_sums import ONE_BACKWARD
from paceline.errors import ConfigurationError, HookAlreadyRegisteredError


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
    if policy.deterministic and not refuses_nondeterminism():
        raise ConfigurationError(
            f"Rank {rank}: torch.use_deterministic_algorithms has been switched off, or only warns "
            "(warn_only=True), so operations may run that give other bits each time. Leave it on, "
            "or give "
            f"DistributedDataParallel shards=paceline.Shards({policy.count}, deterministic=False)."
        )
    if not syncs:
        raise ConfigurationError(
            f"Rank {rank}: no_sync() and shards exclude each other. A round over shards is always "
            "reduced, and is added to the gradients that are there: to accumulate, run several "
            "rounds before optimizer.step()."
        )


def refuses_nondeterminism() -> bool:
    """Whether torch raises where an operation has no deterministic implementation."""
    is_on = torch.are_deterministic_algorithms_enabled()
    return is_on and not torch.is_deterministic_algorithms_warn_only_enabled()


def check_cast(found: torch.dtype | None, *, has_sparse: bool) -> None:
    """See that sums can be cast, and are not cast already."""
    if has_sparse:
        raise ConfigurationError(
            "Sparse gradients over shards are summed in their own dtype: a hook that casts cannot "
            "be used here."
        )
    if found is not None:
        raise HookAlreadyRegisteredError(
            f"The sums of shards are cast to {found} already; a second hook cannot be registered."
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


def changed_parameters(rank: int, names: list[str]) -> ConfigurationError:
    """A forward has written to parameters, so that what a shard begins with depends on its rank."""
    return ConfigurationError(
        f"Rank {rank}: a forward of this round has changed {', '.join(names[:5])} in place, as "
        "nn.Embedding(max_norm=...) or a momentum encoder does. The next shard of this rank has "
        "begun with other values than the first one of the next rank. Change parameters after the "
        "loop, or keep such values in a buffer: every shard has its own."
    )


def hooks_in_turns(rank: int) -> ConfigurationError:
    """Gradients are delivered by a backward of their own there."""
    return ConfigurationError(
        f"Rank {rank}: hooks on parameters' gradients and a SyncBatchNorm over shards exclude each "
        "other: the last shard's gradients pass through them twice. Change gradients after "
        "run_shards, or use BatchNorm."
    )


def needs_run_shards(rank: int) -> ConfigurationError:
    """A loop cannot give layers all shards at once."""
    return ConfigurationError(
        f"Rank {rank}: SyncBatchNorm needs all shards at once, but this loop runs them one after "
        "the other. Give what it does to ddp.run_shards(batch, function), which runs them in "
        "turns; or use BatchNorm, whose statistics are the shard's own."
    )
