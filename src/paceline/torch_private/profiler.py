"""The profiler's events and the dumps of the flight recorder."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.torch_private.names import find, is_there

_profiler_enabled = find("torch.autograd._profiler_enabled")
if not is_there(_profiler_enabled):
    _profiler_enabled = bool  # every forward asks: only the profiler's events are lost
_record_fast = find("torch._C._profiler._RecordFunctionFast")
_FLIGHT_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def replace_flight_dumps(as_pickle: Callable[..., bytes], as_json: Callable[..., bytes]) -> None:
    """Let both dumps of the flight recorder go through a function before they are returned."""
    c10d: Any = torch._C._distributed_c10d
    dump_pickle, dump_json = c10d._dump_fr_trace, c10d._dump_fr_trace_json

    @functools.wraps(dump_pickle)
    def _dump_fr_trace(
        includeCollectives: bool | None = None,
        includeStackTraces: bool | None = None,
        onlyActive: bool | None = None,
    ) -> bytes:
        dump: bytes = dump_pickle(includeCollectives, includeStackTraces, onlyActive)
        if includeCollectives is False:
            return dump
        with_frames = includeStackTraces is not False
        return as_pickle(dump, only_active=bool(onlyActive), with_frames=with_frames)

    @functools.wraps(dump_json)
    def _dump_fr_trace_json(
        includeCollectives: bool | None = None, onlyActive: bool | None = None
    ) -> bytes:
        dump: bytes = dump_json(includeCollectives, onlyActive)
        if includeCollectives is False:
            return dump
        return as_json(dump, only_active=bool(onlyActive), with_frames=False)

    c10d._dump_fr_trace, c10d._dump_fr_trace_json = _dump_fr_trace, _dump_fr_trace_json


def flight_entries(count: int) -> list[str]:
    """Tell the latest collectives of the flight recorder, newest first; none if it is off."""
    if not any(os.environ.get(each, "0") != "0" for each in _FLIGHT_SIZES):
        return []
    c10d: Any = torch._C._distributed_c10d
    entries = json.loads(c10d._dump_fr_trace_json(True, False)).get("entries", [])
    return [
        f"{each.get('profiling_name')} #{each.get('collective_seq_id')}, {each.get('state')}"
        for each in reversed(entries[-count:])
    ]


def is_profiled() -> bool:
    """Say whether a profiler is recording this thread."""
    return bool(_profiler_enabled())


def record_inputs(name: str, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Record an event for the profiler, with the shapes of tensors."""
    event: AbstractContextManager[None] = _record_fast(name, list(tensors))
    return event


def record_until_done(name: str) -> torch.futures.Future[None]:
    """Record an event for the profiler that ends, on whatever thread, with the returned future."""
    record = torch.autograd.profiler.record_function(name)
    future: torch.futures.Future[None] = torch.futures.Future()
    record.__enter__()
    record._call_end_callbacks_on_future(future)
    return future
