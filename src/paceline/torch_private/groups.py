"""Process groups of c10d: their stores, names, counts and time-outs, and groups made by hand."""

from __future__ import annotations

import datetime
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.torch_private.names import find

_get_default_group = find("torch.distributed.distributed_c10d._get_default_group")
_rank_not_in_group = find("torch.distributed.distributed_c10d._rank_not_in_group")
_set_pg_timeout = find("torch.distributed.distributed_c10d._set_pg_timeout")

if not dist.is_initialized():
    # Its functions have the default group as default argument: None here, but the group, for ever,
    # once there is one. torch imports it in the first step (by way of torch._dynamo), and a group
    # that is referred to keeps its threads and sockets after ``destroy_process_group``.
    importlib.import_module("torch.distributed.nn.functional")


C10D_FILE: str = distributed_c10d.__file__
"""Where the functions of ``torch.distributed`` are: frames are compared with it."""


SHRINK_ABORT: int = distributed_c10d.SHRINK_ABORT


def is_backend_in_use(backend: Any) -> bool:
    """Whether a group that is registered has this backend for the CPU."""
    for group in registered_groups():
        try:
            if group._get_backend(torch.device("cpu")) is backend:
                return True
        except RuntimeError:  # it has none for the CPU
            continue
    return False


def collectives_started(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has started on a group; 0 if the backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def collectives_of_all_groups() -> int:
    """How many collectives this rank has started on all groups that there are."""
    return sum(map(collectives_started, registered_groups()))


def gloo_group(store: Any, gloo: dist.ProcessGroupGloo) -> dist.ProcessGroup:
    """Make a group by hand: ``new_group`` needs a default group, which there may not be."""
    group = dist.ProcessGroup(store, gloo.rank(), gloo.size())
    _attach(group, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def gloo_options(timeout: datetime.timedelta, threads: int) -> Any:
    """What a gloo group is made with, if not only with a time-out."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # As torch does where it is given a time-out only.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
        gloo.create_default_device()
    ]
    options._timeout = timeout
    options._threads = threads
    return options


def attach_cpu_backend(group: dist.ProcessGroup, backend: dist.ProcessGroupGloo) -> None:
    """Let ``group._get_backend(torch.device("cpu"))`` return a backend, for a group in Python."""
    _attach(group, dist.ProcessGroup.BackendType.CUSTOM, backend)


def _attach(group: dist.ProcessGroup, kind: Any, backend: dist.ProcessGroupGloo) -> None:
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)


def group_store(group: dist.ProcessGroup) -> Any:
    """The store that a group was made with."""
    return group.get_group_store()


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long a group's collectives may take; None if its backend does not say."""
    devices = group._device_types
    own: datetime.timedelta | None = getattr(group, "_timeout", None)
    if own is not None:  # a group that is written in Python, ours for one
        return own
    try:
        options = group._get_backend(devices[0]).options
    except (IndexError, RuntimeError, AttributeError):
        return None
    timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
    return timeout


def default_group() -> dist.ProcessGroup:
    """The group of ``init_process_group``."""
    group: dist.ProcessGroup = _get_default_group()
    return group


def default_group_or_none() -> dist.ProcessGroup | None:
    """The group of ``init_process_group``, if there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def registered_groups() -> list[dist.ProcessGroup]:
    """All groups that this process has, the default one among them."""
    return list(distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Change how long a group's collectives may take."""
    _set_pg_timeout(timeout, group)


def restart_group_names() -> None:
    """Let the names that c10d gives to groups count from 0 again, as in a new process."""
    distributed_c10d._world.group_count = 0


def registered_name(group: dist.ProcessGroup) -> str | None:
    """The name under which all ranks know a group; None once it is destroyed."""
    return distributed_c10d._world.pg_names.get(group)


def group_named(name: str) -> dist.ProcessGroup | None:
    """The group of that name, if this process has one."""
    found = distributed_c10d._world.pg_names.items()
    return next((group for group, known in list(found) if known == name), None)


def is_slice(device_mesh: Any) -> bool:
    """Whether a mesh is a part of a larger one."""
    return bool(device_mesh._get_root_mesh() != device_mesh)


def is_outside_group(group: Any) -> bool:
    """Whether ``group`` is what ``new_group`` gives a rank that is not in it."""
    return bool(_rank_not_in_group(group))
