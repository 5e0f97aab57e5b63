"""A raw client that waits and sends again, as decision 0007 says: one push at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Frame, Kind, Message, pack_control, read_head
from tests.ps.raw_client import RawClient, attach_frames, rows_frames

SPEC = TableSpec("sums", 1000, 4)


class PatientClient(RawClient):
    """Every sequenced message is acknowledged before the next, whoever dies meanwhile."""

    resent = 0

    def attach_patiently(self) -> None:
        self.deliver(attach_frames(self.next_head(Kind.ATTACH), SPEC))

    def write_zeros(self, ids: Sequence[int], is_alive: Callable[[], bool] = lambda: True) -> None:
        """Set these rows to zero; raises what :meth:`add_one` raises."""
        zeros = torch.zeros(len(ids), SPEC.dim)
        head = self.next_head(Kind.WRITE)
        self.deliver(rows_frames(head, [(0, SPEC, ids, zeros, 0.0)]), is_alive)

    def add_one(self, ids: Sequence[int], is_alive: Callable[[], bool] = lambda: True) -> None:
        """Add exactly 1 to every value of these rows: SGD with lr 1 and gradient -1.

        Raises:
            ConnectionError: The server is dead; ``finish`` goes on with another.
        """
        grad = torch.full((len(ids), SPEC.dim), -1.0)
        head = self.next_head(Kind.PUSH)
        self.deliver(rows_frames(head, [(0, SPEC, ids, grad, 1.0)]), is_alive)

    def deliver(self, frames: list[Frame], is_alive: Callable[[], bool] = lambda: True) -> None:
        self._open, self._request = frames, self.request
        self.socket.send_multipart(frames)
        self.finish(is_alive)

    def send_again(self) -> None:
        """Send the last message once more without asking: applied or not, it counts once."""
        self.socket.send_multipart(self._open)

    def ask(self, frames: Sequence[Frame]) -> Message:
        """Answers to earlier messages, HELLO above all, may come first."""
        request = read_head(frames[0])[0].request
        answer = super().ask(frames)
        while answer.head.request != request:
            answer = self.receive()
        return answer

    def finish(self, is_alive: Callable[[], bool] = lambda: True) -> None:
        """Wait until the last message is acknowledged; say HELLO and send it again if need be."""
        until_s = time.monotonic() + 60.0
        while time.monotonic() < until_s:
            if not self.socket.poll(100):
                if not is_alive():
                    raise ConnectionError
                self.socket.send_multipart(pack_control(self.head(Kind.HELLO), {"nonce": 1}))
                continue
            answer = self.receive()
            if answer.head.kind is Kind.WELCOME:
                if answer.control["applied"] >= self.sequence:
                    return
                self.resent += 1
                self.socket.send_multipart(self._open)
            elif answer.head.kind is Kind.DONE and answer.head.request == self._request:
                return
            elif answer.head.kind is Kind.ERROR:
                raise AssertionError(answer.control)
        raise TimeoutError(f"number {self.sequence} was never acknowledged")

    def values(self, ids: Sequence[int]) -> torch.Tensor:
        """Rows, whatever is still on its way from before."""
        while True:
            head = self.head(Kind.LOOKUP)
            self.socket.send_multipart(rows_frames(head, [(0, SPEC, ids, None, 0.0)]))
            while self.socket.poll(500):
                answer = self.receive()
                if answer.head.kind is Kind.FOUND and answer.head.request == head.request:
                    flat = torch.frombuffer(bytearray(answer.values), dtype=torch.float32)
                    return flat.view(len(ids), SPEC.dim).clone()
