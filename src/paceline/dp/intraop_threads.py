"""The intra-op threads that each replica's thread may use.

Called by :mod:`paceline.dp.parallel_apply`. What else belongs to a thread: ``thread_state.py`` of
the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.dp.replica_threads import ReplicaThreads


def shares_of(total: int, devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Divide the intra-op threads among the replicas on the CPU; others need theirs only to launch.

    Every replica has at least one.
    """
    on_cpu = sum(device.type == "cpu" for device in devices)
    shares = []
    cpu_seen = 0
    for device in devices:
        if device.type != "cpu":
            shares.append(total)
            continue
        shares.append(max(1, total // on_cpu + (cpu_seen < total % on_cpu)))
        cpu_seen += 1
    return tuple(shares)


def divide_intraop_threads(threads: ReplicaThreads, devices: Sequence[torch.device]) -> None:
    """Give each thread its share of what the caller may use; cheap if it has it already.

    ``torch.set_num_threads`` sets the number of its own thread, and what threads begin with that
    have not computed yet. The latter is put back at once.
    """
    total = torch.get_num_threads()
    shares = shares_of(total, devices)
    if threads.shares == shares:
        return
    try:
        for outcome in threads.run([_setter(share) for share in shares]):
            if outcome.error is not None:
                raise outcome.error
    finally:
        torch.set_num_threads(total)
    threads.shares = shares


def _setter(share: int) -> Callable[[], None]:
    def set_share() -> None:
        torch.get_num_threads()  # a thread that has not computed would begin with the default
        torch.set_num_threads(share)

    return set_share
