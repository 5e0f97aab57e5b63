"""The trainer's own share of a step with parameter servers, without servers.

``python -m benchmarks ps_trainer --help``. A channel that answers at once from memory stands for
each server, so what is left is what a trainer computes: reading inputs, planning, messages and
their ledger, pooling, gradients. CPU time of the thread, by phase; medians of many steps. What
torch's engine needs for the same graph with an empty backward is taken off, and shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from paceline import ps
from paceline.cli.bench.harness import report
from paceline.cli.bench.harness.options import add_outputs, describe, positive
from paceline.native.extension import native
from paceline.ps.client.channel import Channel
from paceline.ps.client.connection import Servers
from paceline.ps.client.ledger import Ledger, OpenRequest
from paceline.ps.client.server_name import ServerName
from paceline.ps.protocol.wire import Frame, Head, Kind, pack_control, pack_head, unpack

PHASES = ("forward", "prefetch", "backward", "step", "torch's part of backward")
CLIENT = bytes(16)


class MemoryChannel:
    """Answers from memory: a lookup with zeros, a push with DONE."""

    def __init__(self, index: int, row_bytes: int) -> None:
        self.server = ServerName(index, f"memory {index}")
        self.names: dict[int, str] = {}
        self._zeros = memoryview(bytearray(64 << 20))
        self._row_bytes = row_bytes
        self._ledger = Ledger(CLIENT)
        hello = unpack(self._ledger.hello()).control
        welcome = {"nonce": hello["nonce"], "applied": 0, "incarnation": "memory"}
        self._ledger.take(pack_control(Head(Kind.WELCOME, 0, CLIENT), welcome))
        self._done = pack_control(Head(Kind.DONE, 0, CLIENT), {})[0]

    def post(self, pending: OpenRequest) -> OpenRequest:
        """Note a request, and answer it."""
        self._ledger.enter(pending)
        self._ledger.take(self._reply(pending))
        return pending

    def hold(self, is_held: bool) -> None:
        """Nobody has to be woken."""

    def wait(self, pending: OpenRequest) -> list[Frame]:
        """The answer, which is there."""
        assert pending.reply is not None
        return pending.reply

    def abandon(self, pending: OpenRequest) -> None:
        """Nothing is on its way."""

    def take_refused(self) -> None:
        """Nothing is refused."""

    def _reply(self, pending: OpenRequest) -> list[Frame]:
        if pending.kind is not Kind.LOOKUP:
            return [pack_head(Head(Kind.DONE, pending.request, CLIENT)) + self._done[48:]]
        head = pack_head(Head(Kind.FOUND, pending.request, CLIENT), pending.sections)
        size = len(pending.arrays[0]) // 8 * self._row_bytes
        return [memoryview(head + pending.tail), b"", self._zeros[:size]]


class MemoryServers(Servers):
    """A connection to nobody."""

    def __init__(self, count: int, row_bytes: int) -> None:
        self.addresses = [f"memory {index}" for index in range(count)]
        self.epoch = 0
        channels: Any = tuple(MemoryChannel(index, row_bytes) for index in range(count))
        self.channels: tuple[Channel, ...] = channels

    def ask(self, requests: Sequence[tuple[int, Kind, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Every table is welcome."""
        return [{"table": number} for number, _ in enumerate(requests)]

    def stats(self) -> list[dict[str, Any]]:
        """No table is there yet."""
        return [{"tables": []} for _ in self.channels]

    def flush(self, timeout_s: float | None = None) -> None:
        """Nothing is on its way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks ps_trainer --ids 35 --sharding hash --own-ids")
    add_outputs(parser, plot=False)
    parser.add_argument("--tables", type=positive, default=8, help="default: 8")
    parser.add_argument("--rows", type=positive, default=300, help="default: 300")
    parser.add_argument("--dim", type=positive, default=64, help="default: 64")
    parser.add_argument("--ids", type=positive, default=35, help="default: 35")
    parser.add_argument("--bag", type=positive, default=5, help="ids of a bag; default: 5")
    parser.add_argument("--servers", type=positive, default=2, help="default: 2")
    parser.add_argument("--steps", type=positive, default=1000, help="default: 1000")
    parser.add_argument("--sharding", choices=("table", "hash", "range"), default="table")
    parser.add_argument("--mode", choices=("sum", "mean", "max"), default="sum")
    parser.add_argument(
        "--own-ids", action="store_true", help="each table has ids of its own, instead of the same"
    )
    parser.add_argument(
        "--cold", type=int, default=0, metavar="MB", help="read so much memory between the phases"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    torch.set_num_threads(1)
    times = _measure(args)
    table = Table(title="CPU of a trainer's step, without servers, in microseconds")
    for heading in ("phase", "median", "10 %", "90 %"):
        table.add_column(heading, justify="right" if heading != "phase" else "left")
    for phase in PHASES:
        ordered = sorted(each * 1e6 for each in times[phase])
        low, high = ordered[len(ordered) // 10], ordered[-len(ordered) // 10]
        table.add_row(phase, *(f"{each:.0f}" for each in (statistics.median(ordered), low, high)))
    report.console().print(table)
    report.console().print(f"native core: {'no' if native is None else 'yes'}; pid {os.getpid()}")
    report.write_json(args.json, {"times_s": times, "is_native": native is not None})
    return 0


def _measure(args: argparse.Namespace) -> dict[str, list[float]]:
    names = [f"table {at}" for at in range(args.tables)]
    module = ps.EmbeddingBagCollection(
        [
            ps.TableConfig(name, args.rows, args.dim, mode=args.mode, sharding=args.sharding)
            for name in names
        ],
        servers=MemoryServers(args.servers, args.dim * 4),
        optimizer=ps.SGD(0.05),
    )
    batches = _batches(args, names)
    junk = torch.zeros(args.cold << 18)
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    module.prefetch(batches[0])
    for at in range(args.steps + _WARM_UP):
        spent = _step(module, batches[at % 100], batches[(at + 1) % 100], junk)
        if at >= _WARM_UP:
            ours = spent[:3]
            for phase, spent_s in zip(PHASES, [*ours, sum(ours), spent[3]], strict=True):
                times[phase].append(spent_s)
    return times


_WARM_UP = 100


def _batches(args: argparse.Namespace, names: Sequence[str]) -> list[dict[str, ps.Bags]]:
    generator = torch.Generator().manual_seed(0)

    def bags() -> ps.Bags:
        low, high = (args.ids + 1) // 2, args.ids + args.ids // 2
        count = int(torch.randint(low, high + 1, (), generator=generator))
        ids = torch.randint(args.rows, (count,), generator=generator)
        return ps.Bags(ids, torch.arange(0, count, args.bag))

    if args.own_ids:
        return [{name: bags() for name in names} for _ in range(100)]
    return [dict.fromkeys(names, bags()) for _ in range(100)]


def _step(
    module: ps.EmbeddingBagCollection,
    batch: dict[str, ps.Bags],
    upcoming: dict[str, ps.Bags],
    junk: torch.Tensor,
) -> list[float]:
    """CPU seconds of the phases, and of torch's own share of the last one."""
    clock = time.thread_time
    junk.sum()
    start_s = clock()
    found = module(batch)
    forward_s = clock() - start_s
    junk.sum()
    start_s = clock()
    module.prefetch(upcoming)
    prefetch_s = clock() - start_s
    features = torch.cat(list(found.values()), 1)
    gradient = torch.ones_like(features)
    same = [each.detach() for each in found.values()]
    nothing = torch.cat(_Nothing.apply(_ANCHOR, *same), 1)  # type: ignore[no-untyped-call]
    junk.sum()
    start_s = clock()
    nothing.backward(gradient)
    floor_s = clock() - start_s
    junk.sum()
    start_s = clock()
    features.backward(gradient)
    return [forward_s, prefetch_s, clock() - start_s - floor_s, floor_s]


_ANCHOR = torch.empty(0, requires_grad=True)


class _Nothing(torch.autograd.Function):
    """As many outputs as there are tables, and a backward that does nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(torch.empty_like(each) for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None,) * len(ctx.needs_input_grad)
