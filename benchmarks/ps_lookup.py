"""Lookups and pushes through parameter servers: cost follows the distinct ids, not the table.

``python -m benchmarks ps_lookup --help``. Tables of several sizes live on the same servers and take
turns, with batches that have the same number of distinct ids; one more column has ids drawn from
the whole table. Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.table import Table

from paceline import ps
from paceline.cli.bench.harness import report
from paceline.cli.bench.harness.options import add_outputs, describe, integers, positive
from paceline.cli.bench.harness.progress import RoundBar

MIB = 1 << 20


@dataclass
class Result:
    """One table.

    Args:
        rows: Of the table.
        unique: Distinct ids of a batch.
        lookup_s: Of each round: forward.
        push_s: Of each round: backward, until it is acknowledged.
        moved_bytes: Of one step, both ways.
        server_bytes: Of its rows on all servers, once all rounds are done.
    """

    rows: int
    unique: int
    lookup_s: list[float] = field(default_factory=list)
    push_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    server_bytes: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, "python -m benchmarks ps_lookup --rows 10000,1000000 --rounds 5")
    add_outputs(parser, plot=False)
    parser.add_argument(
        "--rows",
        type=integers,
        default=[10_000, 100_000, 1_000_000, 10_000_000],
        help="default: 10000,100000,1000000,10000000",
    )
    parser.add_argument("--unique", type=positive, default=10_000, help="default: 10000")
    parser.add_argument("--dim", type=positive, default=64, help="default: 64")
    parser.add_argument("--bags", type=positive, default=4096, help="default: 4096")
    parser.add_argument("--ids", type=positive, default=20, help="of a bag; default: 20")
    parser.add_argument("--servers", type=positive, default=2, help="default: 2")
    parser.add_argument("--rounds", type=positive, default=10, help="default: 10")


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    torch.set_num_threads(1)
    with (
        ps.local(args.servers, start_method="forkserver") as local,
        ps.connect(local) as servers,
    ):
        modules = [
            ps.EmbeddingBag(rows, args.dim, mode="sum", servers=servers, name=f"table{at}")
            for at, rows in enumerate([*args.rows, max(args.rows)])
        ]
        results = _measure(args, servers, modules)
        stats = servers.stats()
    for at, result in enumerate(results):
        result.server_bytes = sum(
            table["bytes"]
            for each in stats
            for table in each["tables"]
            if table["name"] == f"table{at}"
        )
    rss_bytes = [each["rss_bytes"] for each in stats]
    report.console().print(_table(args, results, rss_bytes))
    found = {"results": [asdict(each) for each in results], "server_rss_bytes": rss_bytes}
    report.write_json(args.json, {**found, "trainer_rss_bytes": _own_rss_bytes()})
    return 0


def _measure(
    args: argparse.Namespace, servers: ps.Servers, modules: list[ps.EmbeddingBag]
) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    count = args.bags * args.ids
    batches = []
    for at, module in enumerate(modules):
        rows = module.num_embeddings
        pool = min(args.unique, rows) if at < len(modules) - 1 else rows
        # Every id of the pool at least once, and spread over the whole table.
        drawn = torch.randint(pool, (count,), generator=generator)
        if pool <= count:
            drawn[:pool] = torch.arange(pool)
        batches.append((drawn * (rows // pool)).view(args.bags, args.ids))
    results = [
        Result(module.num_embeddings, len(batch.unique()))
        for module, batch in zip(modules, batches, strict=True)
    ]
    with RoundBar("rounds", args.rounds + 1) as bar:
        for number in range(args.rounds + 1):
            for module, batch, result in zip(modules, batches, results, strict=True):
                _step(servers, module, batch, result, is_counted=number > 0)
            bar.advance()
    return results


def _step(
    servers: ps.Servers,
    module: ps.EmbeddingBag,
    batch: torch.Tensor,
    result: Result,
    is_counted: bool,
) -> None:
    before = _moved_bytes(servers)
    start_s = time.perf_counter()
    output = module(batch)
    found_s = time.perf_counter()
    output.backward(output.detach())
    servers.flush()
    end_s = time.perf_counter()
    if is_counted:  # the first round makes the rows
        result.lookup_s.append(found_s - start_s)
        result.push_s.append(end_s - found_s)
        result.moved_bytes = _moved_bytes(servers) - before


def _moved_bytes(servers: ps.Servers) -> int:
    return sum(each.sent_bytes + each.received_bytes for each in servers.channels)


def _own_rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _table(args: argparse.Namespace, results: list[Result], rss_bytes: list[int]) -> Table:
    caption = (
        f"resident: servers {', '.join(f'{each / MIB:.0f}' for each in rss_bytes)} MiB, "
        f"trainer {_own_rss_bytes() / MIB:.0f} MiB; ratio: of a step to the first "
        "line's; the last line draws from the whole table"
    )
    table = Table(
        title=f"{args.bags} bags of {args.ids} ids, {args.dim} values each, {args.servers} servers",
        caption=caption,
    )
    headings = ("rows", "distinct ids", "lookup ms", "push ms", "ratio")
    for heading in (*headings, "ids/s", "MB a step", "MB on servers"):
        table.add_column(heading, justify="right")
    for result in results:
        steps = [a + b for a, b in zip(result.lookup_s, result.push_s, strict=True)]
        smallest = [a + b for a, b in zip(results[0].lookup_s, results[0].push_s, strict=True)]
        ratio = statistics.median(a / b for a, b in zip(steps, smallest, strict=True))
        table.add_row(
            f"{result.rows:,}",
            f"{result.unique:,}",
            f"{statistics.median(result.lookup_s) * 1e3:.1f}",
            f"{statistics.median(result.push_s) * 1e3:.1f}",
            f"{ratio:.2f}",
            f"{args.bags * args.ids / statistics.median(steps):,.0f}",
            f"{result.moved_bytes / 1e6:.1f}",
            f"{result.server_bytes / 1e6:.1f}",
        )
    return table
