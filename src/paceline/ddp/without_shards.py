"""What a wrapper with shards cannot be asked for, and why: each has an error that says so."""

from __future__ import annotations

from paceline.errors import ConfigurationError

_OWN_BUFFERS = "every shard has its own buffers, and all ranks get their mean. Leave it out."

_REASONS = {
    "static_graph": "what one shard of a rank uses says nothing of the others. Leave it out, or "
    "take find_unused_parameters=True.",
    "skip_all_reduce_unused_params": "whether a bucket is used would depend on who owns which "
    "shard. Leave it out.",
    "delay_all_reduce_named_params": "delayed gradients are averaged apart, in the order of ranks. "
    "Leave it out.",
    "mixed_precision": "gradients would be cast in other places at other numbers of ranks. Use "
    "torch.autocast, which works.",
    "broadcast_buffers": _OWN_BUFFERS,
    "forward_sync_buffers": _OWN_BUFFERS,
    "device_mesh": "tensor parallelism adds up in an order of its own. Leave one of the two out.",
}
CONSTRUCTOR_ARGUMENTS = tuple(_REASONS)

_REASONS |= {
    "no_sync()": "a loop over shards is always reduced, and is added to the gradients that are "
    "there. To accumulate, run several before optimizer.step().",
    "A communication hook": "a hook sees the gradients of a rank, so that its bits depend on the "
    "number of ranks. Only fp16_compress_hook and bf16_compress_hook of paceline.hooks, which "
    "cast, can be applied to every shard. Leave one of the two out.",
    "join()": "every rank runs the same number of loops over shards. Use weighted(0) for a shard "
    "without samples.",
    "require_manual_backward_finalization": "a loop over shards ends its step by itself. Leave one "
    "of the two out.",
    "_register_buffer_comm_hook()": _OWN_BUFFERS,
}


def excludes_shards(what: str) -> ConfigurationError:
    """Return the error for something that shards exclude."""
    return ConfigurationError(f"{what} and shards exclude each other: {_REASONS[what]}")
