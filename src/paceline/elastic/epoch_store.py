"""Where the ranks of an epoch meet: with the launcher, never in a rank.

On one host a file in the launcher's private directory; on several a store of the first host's
launcher, through the tunnel of :mod:`paceline.elastic.hosts.tunnel`.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.elastic.protocol import DIRECTORY, STORE, store_path

_TIMEOUT = datetime.timedelta(seconds=60)


def is_on_several_hosts() -> bool:
    """Whether the job may have ranks elsewhere."""
    return STORE in os.environ


def open_store(epoch: int, world: int) -> Any:
    """Open the store of an epoch; all its ranks find the same."""
    if STORE not in os.environ:
        path = store_path(Path(os.environ[DIRECTORY]), epoch)
        return dist.FileStore(str(path), world)  # type: ignore[attr-defined]
    port = int(os.environ[STORE])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"epoch-{epoch}", store)  # type: ignore[attr-defined]
