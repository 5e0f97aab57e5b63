"""The profiler's events and the dumps of the flight recorder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch


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


def is_profiled() -> bool:
    """Say whether a profiler is recording this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def record_inputs(name: str, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Record an event for the profiler, with the shapes of tensors."""
    event: AbstractContextManager[None] = torch._C._profiler._RecordFunctionFast(
        name, list(tensors)
    )
    return event


def record_until_done(name: str) -> torch.futures.Future[None]:
    """Record an event for the profiler that ends, on whatever thread, with the returned future."""
    record = torch.autograd.profiler.record_function(name)
    future: torch.futures.Future[None] = torch.futures.Future()
    record.__enter__()
    record._call_end_callbacks_on_future(future)
    return future
