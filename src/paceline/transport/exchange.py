"""Small messages between ranks, as bytes: for construction and for errors, never in a healthy step.

No pickle: callers send JSON or digests. Sizes are checked before memory is set aside for them.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from paceline.types import Messages

MAX_MESSAGE_BYTES = 64 * 1024 * 1024


def gather_bytes(
    messages: Messages, what: str, payload: bytes, device: torch.device
) -> list[bytes]:
    """Give every rank the payload of every rank, in rank order."""
    mine = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [int(size) for size in messages.gather(what, mine)]
    longest = max(lengths)
    if longest > MAX_MESSAGE_BYTES:
        raise ValueError(f"a rank announces {longest} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8, device=device)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return [
        bytes(data[:length].tolist())
        for data, length in zip(messages.gather(what, padded), lengths, strict=True)
    ]


def gather_digests(
    messages: Messages, what: str, digest: bytes, device: torch.device
) -> list[bytes]:
    """Like :func:`gather_bytes` for payloads of one fixed length: a single collective."""
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    return [bytes(data.tolist()) for data in messages.gather(what, mine)]


def gather_json(messages: Messages, what: str, value: Any, device: torch.device) -> list[Any]:
    """Exchange something JSON can say."""
    payloads = gather_bytes(messages, what, json.dumps(value).encode(), device)
    return [json.loads(payload) for payload in payloads]


def broadcast_integers(
    messages: Messages, what: str, values: list[int], device: torch.device
) -> list[int]:
    """Give every rank the integers of group rank 0; all ranks must send as many."""
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    messages.broadcast(what, tensor, 0)
    return [int(value) for value in tensor.tolist()]
