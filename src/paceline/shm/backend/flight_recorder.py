"""The collectives of Paceline groups in torch's flight recorder.

If ``TORCH_FR_BUFFER_SIZE`` is set, torch keeps the latest collectives of each rank in a ring, and
``torchfrtrace`` finds out from the dumps of all ranks which of them did not come. The ring is
inside of C++ and takes entries of C++ groups only. So Paceline groups keep a ring of their own,
with the same entries, and the functions that dump torch's add them. Nothing is kept, and nothing
is replaced, while the variable is not set.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from paceline.containers import tensors_in
from paceline.observe.stall.places import walk_out
from paceline.torch_private.profiler import replace_flight_dumps

SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
MAX_FRAMES = 32
# What the recorder calls c10d's methods, where it does not use their names.
NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "monitored_barrier": "barrier",
}
# Methods whose second argument, if any, is not a tensor.
IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"})
# Point to point is the inner group's, and torch records it.
UNRECORDED = frozenset({"send", "recv", "recv_anysource"})


@dataclass
class FlightEntry:
    """One collective: what ``torchfrtrace`` asks of an entry, and how to learn its state."""

    record: dict[str, Any]
    frames: list[dict[str, Any]]
    has_returned: bool = False
    work: weakref.ref[Any] | None = None

    def follow(self, work: Any) -> None:
        """The call has returned. Weak: a work holds its tensors."""
        self.has_returned = True
        if isinstance(work, torch.distributed.Work) and not work.is_completed():
            self.work = weakref.ref(work)

    def is_active(self) -> bool:
        """Say whether it is under way; one that raised stays so, as the last that was seen."""
        if not self.has_returned:
            return True
        work = self.work() if self.work is not None else None
        return work is not None and not work.is_completed()

    def to_dict(self) -> dict[str, Any]:
        """Return it in torch's form."""
        active = self.is_active()
        return {**self.record, "state": "started" if active else "completed", "retired": not active}


class FlightRecorder:
    """The latest collectives of all Paceline groups of this process."""

    def __init__(self, size: int) -> None:
        self._entries: deque[FlightEntry] = deque(maxlen=size)
        self._numbers = itertools.count()
        self._groups: dict[str, dict[str, str]] = {}

    def record(self, group: Any, method: str, args: tuple[Any, ...]) -> FlightEntry | None:
        """Note that a group begins a collective."""
        if method in UNRECORDED:
            return None
        name, text = group.group_name, group.group_desc
        sequence = group._get_sequence_number_for_group()
        if name not in self._groups:
            ranks = str(list(torch.distributed.get_process_group_ranks(group)))
            self._groups[name] = {"name": name, "desc": text, "ranks": ranks}
        outputs = list(tensors_in(args[0])) if args else []
        inputs = outputs if method in IN_PLACE else list(tensors_in(args[1]))
        entry = FlightEntry(
            {
                "record_id": next(self._numbers),
                "pg_id": int(name) if name.isdigit() else 0,
                "process_group": (name, text),
                "thread_name": threading.current_thread().name,
                "thread_id": str(threading.get_ident()),
                "collective_seq_id": sequence,
                "p2p_seq_id": 0,
                "op_id": sequence,
                # torchfrtrace refuses backends that it does not know.
                "profiling_name": f"gloo:{NAMES.get(method, method)}",
                "time_created_ns": time.time_ns(),
                "input_sizes": [list(tensor.shape) for tensor in inputs],
                "input_dtypes": [_dtype_name(tensor) for tensor in inputs],
                "output_sizes": [list(tensor.shape) for tensor in outputs],
                "output_dtypes": [_dtype_name(tensor) for tensor in outputs],
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "timeout_ms": int(1000 * group.timeout_s),
                "is_p2p": False,
            },
            _frames(),
        )
        self._entries.append(entry)
        return entry

    def add_to(self, dump: dict[str, Any], *, only_active: bool, with_frames: bool) -> None:
        """Add all entries to one of torch's dumps."""
        config = dump.setdefault("pg_config", {})
        config.update(self._groups)
        config.pop("", None)  # gloo's groups say nothing of themselves
        entries = [entry for entry in dump.get("entries", ()) if not self._is_inner(entry)]
        for entry in list(self._entries):
            if not only_active or entry.is_active():
                frames = {"frames": entry.frames} if with_frames else {}
                entries.append({**frames, **entry.to_dict()})
        dump["entries"] = entries

    def _is_inner(self, entry: dict[str, Any]) -> bool:
        """Say whether it is what our inner group did for a collective that we have ourselves."""
        return not entry["is_p2p"] and entry["process_group"][0] in self._groups


def _dtype_name(tensor: torch.Tensor) -> str:
    """Return the name that C++ has for a dtype: ``Float`` for ``torch.float32``."""
    return str(torch.empty(0, dtype=tensor.dtype).type()).rpartition(".")[2].removesuffix("Tensor")


def _frames() -> list[dict[str, Any]]:
    """Return the stack of the caller, without ours."""
    return [
        {
            "name": frame.f_code.co_name,
            "filename": frame.f_code.co_filename,
            "line": frame.f_lineno,
        }
        for frame in itertools.islice(walk_out(sys._getframe(4)), MAX_FRAMES)
    ]


def _wanted_size() -> int:
    for variable in SIZE_VARIABLES:
        text = os.environ.get(variable, "")
        if text.isdigit():
            return int(text)
    return 0


_recorder: FlightRecorder | None = None


def flight_recorder() -> FlightRecorder | None:
    """Return the recorder of this process; None if none is asked for."""
    global _recorder
    size = _wanted_size()
    if _recorder is None and size > 0:
        _recorder = FlightRecorder(size)
        _join_dumps(_recorder)
    return _recorder


def _join_dumps(recorder: FlightRecorder) -> None:
    """Let torch's dumps have our entries too."""

    def as_pickle(torch_dump: bytes, *, only_active: bool, with_frames: bool) -> bytes:
        dump = pickle.loads(torch_dump)  # made by torch in this process a moment ago
        recorder.add_to(dump, only_active=only_active, with_frames=with_frames)
        return pickle.dumps(dump)

    def as_json(torch_dump: bytes, *, only_active: bool, with_frames: bool) -> bytes:
        dump = json.loads(torch_dump)
        recorder.add_to(dump, only_active=only_active, with_frames=with_frames)
        return json.dumps(dump).encode()

    replace_flight_dumps(as_pickle, as_json)
