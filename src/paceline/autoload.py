"""What torch's import does for us: the c10d backend, Lightning's strategy, ``PACELINE_PATCH=1``.

torch calls :func:`register_backend` at the end of its own import (the entry point in
pyproject.toml); ``import paceline`` does so too if torch is there already. What the backend needs
is imported when the first group is made: without the variable this must stay cheap.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

from paceline.config import BACKEND_NAME
from paceline.elastic.member_process import meet_in_private
from paceline.elastic.supervised.own_stand_in import watch_rendezvous
from paceline.integrations.lightning_names import register_all

PATCH_VARIABLE = "PACELINE_PATCH"
"""Set to 1, torch's names mean our classes: ``paceline.patch_torch()``, before anybody's import."""


def register_backend() -> None:
    """Register the backend and the strategy, once; patch torch, if the environment asks for it."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, create_group, devices=["cpu"])
    register_all()
    meet_in_private()
    if dist.is_available():
        watch_rendezvous()
    # Here and not later: other modules bind torch's names when they are imported.
    if os.environ.get(PATCH_VARIABLE, "") not in ("", "0"):
        _patch()


def _patch() -> None:
    from paceline.integrations.torch_patch import patch_torch

    for name in patch_torch().changed:
        logging.getLogger("paceline").info("%s: %s is Paceline's", PATCH_VARIABLE, name)


def create_group(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """Make a group; called by ``init_process_group`` and ``new_group``."""
    from paceline.shm.backend.process_group import PacelineGroup

    return PacelineGroup(store, rank, world, timeout)
