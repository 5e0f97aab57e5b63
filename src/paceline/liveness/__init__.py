"""Who the ranks of a group are, whether they live, and which of them died first.

Below shared memory and the transports: whatever waits for a peer asks here.
"""

from paceline.liveness.deaths import Deaths
from paceline.liveness.identity import Identity, describe_process, host_key
from paceline.liveness.of_group import adopt, gather_all, give_up_waits, watch_of
from paceline.liveness.watch import Watch

__all__ = [
    "Deaths",
    "Identity",
    "Watch",
    "adopt",
    "describe_process",
    "gather_all",
    "give_up_waits",
    "host_key",
    "watch_of",
]
