"""Lets ranks tell each other something through the group's store, while they watch each other.

For the making of a group, when there is nothing else to talk over, and for what must not count as
a collective of the group.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from paceline.errors import CollectiveTimeoutError
from paceline.liveness.roster import Gather
from paceline.liveness.watch import Watch

MAX_WORD_BYTES = 1 << 20


def gather_by_store(
    store: Any, rank: int, world: int, watch: Watch, timeout: timedelta, what: str
) -> Gather:
    """Let ranks tell each other something (JSON) through a store."""
    calls = iter(range(1 << 30))

    def gather(value: Any) -> list[Any]:
        call = next(calls)
        store.set(f"paceline/{call}/{rank}", json.dumps(value))
        keys = [f"paceline/{call}/{peer}" for peer in range(world)]
        is_there = watch.wait_until(what, lambda: bool(store.check(keys)), timeout)
        if not is_there:
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
            raise CollectiveTimeoutError(
                f"Rank {rank}: {what} was given up. Timed out waiting: after {timeout}, ranks "
                f"{missing} have not come. See what they are doing.",
                rank=next(iter(missing), None),
                missing=missing,
                operation=what,
            )
        words: list[bytes] = [store.get(key) for key in keys]
        if max(map(len, words)) > MAX_WORD_BYTES:
            raise ValueError(f"a rank sent more than {MAX_WORD_BYTES} bytes")
        return [json.loads(word) for word in words]

    return gather
