"""Small messages between ranks, as bytes: for construction and for errors, never in a healthy step.

No pickle: callers send JSON or digests. Sizes are checked before memory is set aside for them.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

MAX_MESSAGE_BYTES = 64 * 1024 * 1024


def gather_bytes(group: dist.ProcessGroup, payload: bytes, device: torch.device) -> list[bytes]:
    """Give every rank the payload of every rank, in rank order."""
    sizes = _gather(group, torch.tensor([len(payload)], dtype=torch.int64, device=device))
    lengths = [int(size) for size in sizes]
    longest = max(lengths)
    if longest > MAX_MESSAGE_BYTES:
        raise ValueError(f"a rank announces {longest} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8, device=device)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return [
        bytes(data[:length].tolist())
        for data, length in zip(_gather(group, padded), lengths, strict=True)
    ]


def gather_digests(group: dist.ProcessGroup, digest: bytes, device: torch.device) -> list[bytes]:
    """Like :func:`gather_bytes` for payloads of one fixed length: a single collective."""
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    return [bytes(data.tolist()) for data in _gather(group, mine)]


def gather_json(group: dist.ProcessGroup, value: Any, device: torch.device) -> list[Any]:
    """Exchange something JSON can say."""
    payloads = gather_bytes(group, json.dumps(value).encode(), device)
    return [json.loads(payload) for payload in payloads]


def broadcast_integers(
    group: dist.ProcessGroup, values: list[int], device: torch.device
) -> list[int]:
    """Give every rank the integers of group rank 0; all ranks must send as many."""
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
    return [int(value) for value in tensor.tolist()]


def _gather(group: dist.ProcessGroup, mine: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([out], [mine]).wait()
    return [tensor.cpu() for tensor in out]
