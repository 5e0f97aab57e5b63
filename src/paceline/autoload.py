"""Makes ``dist.init_process_group("paceline")`` known to c10d, without importing much.

torch calls :func:`register_backend` at the end of its own import (the entry point in
pyproject.toml); ``import paceline`` does so too if torch is there already. What the backend needs
is imported when the first group is made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from paceline.config import BACKEND_NAME


def register_backend() -> None:
    """Register the backend, once."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, create_group, devices=["cpu"])


def create_group(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """Make a group; called by ``init_process_group`` and ``new_group``."""
    from paceline.shm.backend.process_group import PacelineGroup

    return PacelineGroup(store, rank, world, timeout)
