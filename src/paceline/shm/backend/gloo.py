"""The gloo group inside a Paceline group: for what shared memory does not do, and between hosts.

One of the few places that build a c10d group by hand: inside ``init_process_group`` there is no
default group yet, so that ``new_group`` cannot be called.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.torch_private.groups import gloo_group

MAKING = "the making of the group"


def make_gloo(
    store: Any, rank: int, world: int, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    """Make a gloo group over ``store``; collective over its ranks."""
    own_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return gloo_group(own_store, dist.ProcessGroupGloo(own_store, rank, world, timeout))
