"""What one small message costs a parameter server, without its socket: microseconds an answer.

The tables of one server answer LOOKUP and PUSH through the native core and through Python alone, in
one process and in turn. Between two messages a few megabytes are touched, as trainers on the same
cores do: a server's code and rows are then not in the nearest caches.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.table import Table

from paceline.cli.bench.harness import report
from paceline.cli.bench.harness.options import add_outputs, describe, positive
from paceline.cli.bench.harness.progress import RoundBar

OPTIMIZERS = ["SGD", "Adagrad", "RowwiseAdagrad", "Adam"]
CLIENT = b"benchmark client"


@dataclass(frozen=True)
class Shape:
    """A message: so many sections of so many ids."""

    sections: int
    ids: int

    def __str__(self) -> str:
        return f"{self.sections} x {self.ids}"


@dataclass
class Answers:
    """Microseconds of each round's median, by way."""

    lookup_us: dict[str, list[float]] = field(default_factory=dict)
    push_us: dict[str, list[float]] = field(default_factory=dict)


class Way:
    """A server without a socket, of one package.

    Args:
        package: ``paceline``, or a copy of it under another name.
        is_native: False: Python alone.
        args: The command line's.
        shape: Of the messages.
    """

    def __init__(
        self, package: str, is_native: bool, args: argparse.Namespace, shape: Shape
    ) -> None:
        def part(name: str) -> Any:
            return importlib.import_module(f"{package}.{name}")

        extension, spec = part("native.extension"), part("ps.protocol.table_spec")
        self._wire = part("ps.protocol.wire")
        native = extension.native
        if not is_native:
            extension.native = None
        try:
            self._store = part("ps.state.store").Store(1 << 36, 1 << 30)
        finally:
            extension.native = native
        place = part("ps.server.save_root").SaveRoot(None)
        self._handler = part("ps.server.dispatch").Handler(self._store, None, place)
        optimizer = getattr(part("ps.protocol.optimizers"), args.optimizer)(0.1)
        whole = spec.Shard(spec.Sharding.TABLE, 0, 1)
        self._shape, self._sequence = shape, 0
        self._cold = np.zeros(args.touch_mib << 17)
        for number in range(shape.sections):
            rows = max(args.rows, shape.ids)
            made = spec.TableSpec(f"t{number}", rows, args.dim, optimizer=optimizer)
            self._store.create(made, whole)
            self._all_rows(number, rows)

    def _all_rows(self, number: int, rows: int) -> None:
        table = self._store.tables[number]
        ids = np.arange(rows)
        table.materialise(ids, table.locate(ids))

    def lookup_us(self, ids: bytes) -> float:
        """Answer a LOOKUP of these ids."""
        return self._answer_us(self._wire.Kind.LOOKUP, 0, ids, b"")

    def push_us(self, ids: bytes, values: bytes) -> float:
        """Answer a PUSH."""
        self._sequence += 1
        return self._answer_us(self._wire.Kind.PUSH, self._sequence, ids, values)

    def _answer_us(self, kind: Any, sequence: int, ids: bytes, values: bytes) -> float:
        wire = self._wire
        sections = [
            wire.Section(n, wire.Form.ROWS, wire.Dtype.FLOAT32, self._shape.ids, lr=0.1)
            for n in range(self._shape.sections)
        ]
        head = wire.pack_head(wire.Head(kind, 1, CLIENT, sequence), len(sections))
        first = b"".join((head, *map(wire.pack_section, sections)))
        frames = [bytearray(first), bytearray(ids), memoryview(bytearray(values))]
        np.add(self._cold, 1.0, out=self._cold)
        start_ns = time.perf_counter_ns()
        answer = self._handler.answer(frames)
        took_ns = time.perf_counter_ns() - start_ns
        wanted = wire.Kind.DONE if sequence else wire.Kind.FOUND
        assert wire.unpack(answer).head.kind is wanted
        return took_ns / 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks ps_answer --shapes 4x33 --optimizer Adam")
    add_outputs(parser, plot=False)
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default=_shapes("4x33,1x33,1x80000"),
        help="sections x ids of each; default: 4x33,1x33,1x80000",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="SGD", help="default: SGD")
    parser.add_argument("--rows", type=positive, default=300, help="at least; default: 300")
    parser.add_argument("--dim", type=positive, default=64, help="default: 64")
    parser.add_argument("--rounds", type=positive, default=15, help="default: 15")
    parser.add_argument("--messages", type=positive, default=40, help="a round; 40")
    parser.add_argument(
        "--touch-mib",
        type=positive,
        default=8,
        metavar="MIB",
        help="touched before each message; default: 8, more than the second-level cache has",
    )
    parser.add_argument(
        "--also", metavar="PACKAGE", help="a copy of paceline under another name, beside it"
    )


def _shapes(text: str) -> list[Shape]:
    try:
        pairs = [part.split("x") for part in text.split(",")]
        return [Shape(positive(a), positive(b)) for a, b in pairs]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected something like 4x33,1x80000"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    torch.set_num_threads(1)
    ways = {"python": ("paceline", False), "native": ("paceline", True)}
    if args.also:
        ways[args.also] = (args.also, True)
    found = {}
    table = Table(title=f"microseconds an answer, {args.optimizer}, {args.dim} values a row")
    for heading in ("message", *(f"{name} us" for name in ways), "python / native"):
        table.add_column(heading, justify="right")
    for shape in args.shapes:
        made = {name: Way(*how, args, shape) for name, how in ways.items()}
        answers = found[str(shape)] = _measure(args, shape, made)
        for kind, us in (("LOOKUP", answers.lookup_us), ("PUSH", answers.push_us)):
            ratio = statistics.median(
                a / b for a, b in zip(us["python"], us["native"], strict=True)
            )
            times = [f"{statistics.median(us[name]):.1f}" for name in ways]
            table.add_row(f"{kind} {shape}", *times, f"{ratio:.2f}")
    report.console().print(table)
    report.write_json(args.json, {"results": {name: vars(each) for name, each in found.items()}})
    return 0


def _measure(args: argparse.Namespace, shape: Shape, ways: dict[str, Way]) -> Answers:
    chance = np.random.default_rng(0)
    rows = max(args.rows, shape.ids)
    answers = Answers({name: [] for name in ways}, {name: [] for name in ways})
    messages = max(3, min(args.messages, 40 * 10_000 // (shape.ids * shape.sections)))
    size = shape.sections * shape.ids * args.dim
    with RoundBar(str(shape), args.rounds + 1) as bar:
        for number in range(args.rounds + 1):
            drawn = [np.sort(chance.permutation(rows)[: shape.ids]) for _ in range(shape.sections)]
            ids = np.concatenate(drawn).tobytes()
            values = chance.normal(size=size).astype("f4").tobytes()
            for name, way in ways.items():
                pairs = [(way.lookup_us(ids), way.push_us(ids, values)) for _ in range(messages)]
                if number:  # the first round gets warm
                    lookup_us, push_us = zip(*pairs, strict=True)
                    answers.lookup_us[name].append(statistics.median(lookup_us))
                    answers.push_us[name].append(statistics.median(push_us))
            bar.advance()
    return answers
