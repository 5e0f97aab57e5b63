"""A client without any cleverness, for tests of the server: one message, one answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zmq

from paceline.ps.protocol.table_spec import Shard, Sharding, TableSpec
from paceline.ps.protocol.wire import (
    Dtype,
    Form,
    Frame,
    Head,
    Kind,
    Message,
    Section,
    pack_control,
    unpack,
)
from tests.ps.data_messages import pack_data

DTYPES = {torch.float32: Dtype.FLOAT32, torch.float64: Dtype.FLOAT64}
WHOLE = Shard(Sharding.TABLE, 0, 1)


class RawClient:
    """Talks to one server; ``sequence`` and ``client`` can be set to what a test wants."""

    def __init__(self, address: str, timeout_s: float = 20.0) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.connect(address)
        self._timeout_s = timeout_s
        self.client = os.urandom(16)
        self.sequence = 0
        self.request = 0

    def connect(self, address: str) -> None:
        self.socket.connect(address)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()

    def head(self, kind: Kind, sequence: int = 0) -> Head:
        self.request += 1
        return Head(kind, self.request, self.client, sequence)

    def next_head(self, kind: Kind) -> Head:
        self.sequence += 1
        return self.head(kind, self.sequence)

    def ask(self, frames: Sequence[Frame]) -> Message:
        self.socket.send_multipart(list(frames))
        return self.receive()

    def receive(self, timeout_s: float | None = None) -> Message:
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        if not self.socket.poll(int(wait_s * 1000)):
            raise TimeoutError(f"no answer within {wait_s} s")
        return unpack(self.socket.recv_multipart())

    def control(self, kind: Kind, control: dict[str, Any], sequence: int = 0) -> Message:
        return self.ask(pack_control(self.head(kind, sequence), control))

    def hello(self) -> dict[str, Any]:
        return dict(self.control(Kind.HELLO, {"nonce": 7}).control)

    def attach(self, spec: TableSpec, shard: Shard = WHOLE) -> Message:
        return self.ask(attach_frames(self.next_head(Kind.ATTACH), spec, shard))

    def lookup(self, table: int, spec: TableSpec, ids: Sequence[int]) -> torch.Tensor:
        found = self.ask(rows_frames(self.head(Kind.LOOKUP), [(table, spec, ids, None, 0.0)]))
        assert found.head.kind is Kind.FOUND, found.control
        return values_of(found, spec, len(ids))

    def push(
        self, table: int, spec: TableSpec, ids: Sequence[int], grad: torch.Tensor, lr: float
    ) -> Message:
        head = self.next_head(Kind.PUSH)
        return self.ask(rows_frames(head, [(table, spec, ids, grad, lr)]))

    def write(self, table: int, spec: TableSpec, ids: Sequence[int], rows: torch.Tensor) -> Message:
        head = self.next_head(Kind.WRITE)
        return self.ask(rows_frames(head, [(table, spec, ids, rows, 0.0)]))

    def stats(self) -> dict[str, Any]:
        return dict(self.control(Kind.STATS, {}).control)


def attach_frames(head: Head, spec: TableSpec, shard: Shard = WHOLE) -> list[Frame]:
    described = {"sharding": shard.sharding.value, "index": shard.index, "count": shard.count}
    return pack_control(head, {"table": spec.to_json(), "shard": described})


def rows_frames(
    head: Head,
    parts: Sequence[tuple[int, TableSpec, Sequence[int], torch.Tensor | None, float]],
) -> list[Frame]:
    """A message of ROWS sections: table, spec, ids, values, lr."""
    sections, integers, values = [], [], []
    for table, spec, ids, tensor, lr in parts:
        sections.append(Section(table, Form.ROWS, spec.dtype, len(ids), lr=lr))
        integers.append(np.asarray(ids, np.int64).tobytes())
        raw = b"" if tensor is None else raw_bytes(tensor)
        values.append(raw + bytes(-len(raw) % 8))
    return pack_data(head, sections, b"".join(integers), b"".join(values))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def values_of(found: Message, spec: TableSpec, lines: int) -> torch.Tensor:
    dtype = {value: key for key, value in DTYPES.items()}[spec.dtype]
    flat = torch.frombuffer(bytearray(found.values), dtype=dtype)
    return flat[: lines * spec.dim].view(lines, spec.dim).clone()
