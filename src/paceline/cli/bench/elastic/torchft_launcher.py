"""Starts torchft's lighthouse and its replicas, and a replica that died at once again.

``python -m paceline.cli.bench.elastic.torchft_launcher RANKS SCRIPT ARGUMENTS``
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def start(number: int, ranks: int, lighthouse: str) -> subprocess.Popen[bytes]:
    """Start a replica, with a store of its own in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES[number] = store
    environ = os.environ | {
        "REPLICA_GROUP_ID": str(number),
        "REPLICAS": str(ranks),
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    return subprocess.Popen([sys.executable, *sys.argv[2:]], env=environ)


STORES: dict[int, TCPStore] = {}


def main() -> None:
    """Run until SIGTERM."""
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    ranks = int(sys.argv[1])
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    replicas = [start(number, ranks, server.address()) for number in range(ranks)]

    def end(*_: object) -> None:
        for replica in replicas:
            replica.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    while True:
        for number, replica in enumerate(replicas):
            if replica.poll() is not None:
                print(f"replica {number} ended with {replica.returncode}", flush=True)
                replicas[number] = start(number, ranks, server.address())
        time.sleep(0.02)


if __name__ == "__main__":
    main()
