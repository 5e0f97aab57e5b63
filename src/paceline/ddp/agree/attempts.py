"""A constructor that fails on one rank: the others, who wait for it, are told.

Wraps the wrapper's ``__init__``. Also the moment at which a rank says where it runs, before
anything can go wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from paceline.liveness import watch_of

F = TypeVar("F", bound=Callable[..., None])

_GROUP_POSITION = 6
"""Of ``process_group`` among the positional arguments behind ``self``."""


def tells_peers(init: F) -> F:
    """Let peers raise PeerFailedError if this constructor raises here while they wait in it."""

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        group = _find_group(args, kwargs)
        if group is None:  # the constructor says why that cannot work
            init(self, *args, **kwargs)
            return
        with watch_of(group).attempt():
            try:
                init(self, *args, **kwargs)
            except BaseException as error:
                transport = self.__dict__.get("_transport")
                if transport is not None:
                    transport.close(error)
                raise

    return cast(F, wrapped)


def _find_group(args: Sequence[Any], kwargs: dict[str, Any]) -> dist.ProcessGroup | None:
    group = args[_GROUP_POSITION] if len(args) > _GROUP_POSITION else kwargs.get("process_group")
    mesh = kwargs.get("device_mesh")
    if group is None and mesh is not None and getattr(mesh, "ndim", 0) == 1:
        group = mesh.get_group()
    if group is None and mesh is None and dist.is_initialized():
        group = dist.group.WORLD
    return group if isinstance(group, dist.ProcessGroup) else None
