"""``paceline bench hybrid``: trainers with a dense network, servers with embedding tables.

The options, the start of the processes, and what is printed and written at the end. What the
processes do is in :mod:`paceline.cli.bench.hybrid.ranks`, which brings torch with it and is
imported late; numbers become tables in :mod:`paceline.cli.bench.hybrid.report`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.cli.bench.harness.options import add_outputs, describe
from paceline.cli.bench.hybrid.plan import (
    HybridPlan,
    OptimizerName,
    RouteName,
    choose_port,
    parse_routes,
)
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.cli.bench.hybrid.ranks import TrainerResult

LOOPBACK = ("127.0.0.1", "::1", "localhost")
EXAMPLE = """\
paceline bench hybrid --launches 1 --cycles 4 --json hybrid.json
paceline bench hybrid --launches 1 --cycles 4 --optimizer adagrad --journal --route rpc-torch,ps"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    describe(parser, EXAMPLE)
    routes = ", ".join(route.value for route in RouteName)
    parser.add_argument(
        "--route",
        action="append",
        default=[],
        metavar="A,B",
        help=f"which routes: {routes}; may be repeated; default: all, in turn in every cycle",
    )
    parser.add_argument(
        "--optimizer",
        choices=[each.value for each in OptimizerName],
        default=OptimizerName.SGD.value,
        help="of tables and dense network, on every route (default: sgd)",
    )
    parser.add_argument(
        "--journal",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="whether the servers of route ps keep a journal (default: no); torch has none",
    )
    _add_number(parser, "--trainers", 2, "processes with the dense network")
    _add_number(parser, "--servers", 2, "processes that hold the tables")
    _add_number(parser, "--embeddings", 300, "rows of each table")
    _add_number(parser, "--dim", 64, "width of each table; 512/dim tables are made")
    _add_number(parser, "--warmup-cycles", 3, "cycles that are not counted")
    _add_number(parser, "--cycles", 20, "cycles that are: an epoch of every route in each")
    _add_number(parser, "--launches", 2, "how often to start all processes anew and repeat that")
    _add_number(parser, "--seed", 0, "of weights and data")
    parser.add_argument(
        "--master-addr",
        default="127.0.0.1",
        metavar="HOST",
        help="an address of this machine at which the processes meet (default: 127.0.0.1)",
    )
    _add_number(parser, "--master-port", 0, "the port there; 0: a free one")
    add_outputs(parser)


def _add_number(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    help_text = f"{text} (default: {default})"
    parser.add_argument(name, type=int, default=default, metavar="N", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Measure on this machine and print what came out."""
    plan = _plan(args)
    _show(args, plan, _measure(plan, args.timeout))
    return 0


def _plan(args: argparse.Namespace) -> HybridPlan:
    plan = HybridPlan(
        routes=parse_routes(args.route),
        trainers=args.trainers,
        servers=args.servers,
        embeddings=args.embeddings,
        dim=args.dim,
        warmup_cycles=args.warmup_cycles,
        cycles=args.cycles,
        launches=args.launches,
        master_addr=args.master_addr,
        master_port=args.master_port,
        seed=args.seed,
        optimizer=OptimizerName(args.optimizer),
        journal=args.journal,
    )
    plan.check()
    if RouteName.PS in plan.routes and importlib.util.find_spec("zmq") is None:
        raise ConfigurationError(
            "--route ps needs pyzmq: pip install pyzmq, or --route rpc-torch,rpc-paceline"
        )
    return plan.at_port(choose_port(plan.master_addr, plan.master_port))


def _measure(plan: HybridPlan, timeout_s: float) -> list[TrainerResult]:
    """Run both kinds of processes in turn, as often as there are launches."""
    from paceline.cli.bench.hybrid.ranks import joined

    found: list[list[TrainerResult]] = []
    for launch in range(plan.launches):
        parts = plan.parts
        for part in parts[launch % len(parts) :] + parts[: launch % len(parts)]:
            port = choose_port(plan.master_addr, 0) if found else plan.master_port
            title = f"launch {launch + 1} of {plan.launches}, {part.route_names}"
            found.append(_run_part(part.at_port(port), title, timeout_s))
    return joined(found)


def _run_part(plan: HybridPlan, title: str, timeout_s: float) -> list[TrainerResult]:
    from paceline.cli.bench.harness.progress import RoundBar
    from paceline.cli.bench.hybrid.ranks import measured_by, run_process
    from paceline.testing import run_ranks

    bar = RoundBar(title, plan.warmup_cycles + plan.cycles)
    environment = {}
    if plan.master_addr in LOOPBACK:
        # Else both look up the machine's own name, which not every machine can.
        environment = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with ps_servers(plan) as addresses:
        found = run_ranks(
            plan.world,
            run_process,
            plan.with_ps(addresses),
            measured_by(bar),
            timeout_s=timeout_s,
            init=False,
            threads=1,
            env=environment,
        )
    return [result for result in found if result is not None]


@contextlib.contextmanager
def ps_servers(plan: HybridPlan) -> Iterator[Sequence[str]]:
    """Run as many parameter servers as the other routes have, if there is a route for them."""
    if RouteName.PS not in plan.routes:
        yield ()
        return
    from paceline import ps

    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory()) if plan.journal else None
        yield stack.enter_context(ps.local(plan.servers, directory)).addresses


def _show(args: argparse.Namespace, plan: HybridPlan, results: list[TrainerResult]) -> None:
    from paceline.cli.bench.harness import plot, report
    from paceline.cli.bench.hybrid.report import Report

    found, console = Report(plan, results), report.console()
    console.print(found.facts())
    for table in found.tables():
        console.print(table)
    console.print(report.table("an epoch of all trainers", [found.comparison()], plan.base))
    report.write_json(args.json, found.to_json())
    if args.plot is not None:
        plot.draw_comparisons(args.plot, found.title, [found.comparison()])
