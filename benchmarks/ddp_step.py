"""Step time of Paceline's DDP beside torch's, interleaved in one run ([Note: interleaving]).

``python -m benchmarks.ddp_step --help``. What the ranks do is in :mod:`benchmarks.interleave`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks import command
from benchmarks.apart import join_companies, run_company_rank
from benchmarks.interleave import (
    Samples,
    Schedule,
    cpus,
    join_launches,
    mean_over_ranks,
    run_rank,
    walls,
)
from benchmarks.progress import RoundBar
from benchmarks.ratios import Estimate, p50, ratio
from benchmarks.variants import (
    CONTROL,
    LOCAL,
    PACELINE,
    STANDARD,
    TORCH,
    TORCH_VIEWS,
    Variant,
    parse_variant,
)
from benchmarks.workloads import WORKLOADS
from paceline.testing import run_ranks


@dataclass(frozen=True)
class Result:
    """One workload on one number of ranks."""

    workload: str
    ranks: int
    samples: Samples

    @property
    def better(self) -> str:
        """Torch's better mode, over the whole run."""
        return min(TORCH, TORCH_VIEWS, key=lambda label: p50(walls(self.samples[label])))

    def against_torch(self, label: str) -> Estimate:
        """How long a variant takes as a multiple of torch's better mode."""
        return ratio(walls(self.samples[label]), walls(self.samples[self.better]))

    def against_local(self, label: str) -> Estimate:
        """How long a variant takes as a multiple of no communication at all."""
        return ratio(walls(self.samples[label]), walls(self.samples[LOCAL]))

    def cpu_against_torch(self, label: str) -> Estimate:
        """The same for CPU time."""
        return ratio(cpus(self.samples[label]), cpus(self.samples[self.better]))

    @property
    def limit(self) -> float:
        """The target of this workload."""
        return WORKLOADS[self.workload].limit(self.ranks)

    @property
    def is_met(self) -> bool:
        """Whether Paceline is within its targets."""
        local_limit = WORKLOADS[self.workload].local_limit
        if self.ranks == 2 and local_limit and self.against_local(PACELINE).value > local_limit:
            return False
        return self.against_torch(PACELINE).value <= self.limit

    def to_json(self) -> dict[str, Any]:
        """All numbers, down to the single step."""
        return {
            "workload": self.workload,
            "ranks": self.ranks,
            "p50_ms": {label: p50(walls(blocks)) for label, blocks in self.samples.items()},
            "p50_cpu_ms": {label: p50(cpus(blocks)) for label, blocks in self.samples.items()},
            "better_torch_mode": self.better,
            "against_torch": {n: asdict(self.against_torch(n)) for n in self.samples},
            "against_local": {n: asdict(self.against_local(n)) for n in self.samples},
            "cpu_against_torch": {n: asdict(self.cpu_against_torch(n)) for n in self.samples},
            "limit": self.limit,
            "is_met": self.is_met,
            "samples_wall_cpu_ms": self.samples,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print; 1 with --check if a target is missed."""
    args = _parser().parse_args(argv)
    return command.guarded(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "ddp_step",
        "Forward + backward, p50 per variant, in one run in which the variants alternate.",
        "python -m benchmarks.ddp_step --models small,mlp --ranks 2 --rounds 10 --check",
    )
    names = list(WORKLOADS)
    parser.add_argument(
        "--models",
        type=command.one_of(names),
        default=names,
        metavar="A,B",
        help=f"of {','.join(names)} (default: all)",
    )
    parser.add_argument(
        "--ranks", type=command.integers, default=[2, 4], metavar="N,M", help="default: 2,4"
    )
    parser.add_argument(
        "--launches", type=command.positive, default=3, help="in fresh processes (default: 3)"
    )
    parser.add_argument(
        "--rounds",
        type=command.positive,
        default=10,
        help="of all variants, each launch (default: 10)",
    )
    each = ", ".join(f"{name} {workload.steps}" for name, workload in WORKLOADS.items())
    parser.add_argument(
        "--steps", type=command.positive, help=f"steps of a variant in a round (default: {each})"
    )
    parser.add_argument(
        "--also",
        type=parse_variant,
        action="append",
        default=[],
        metavar="LABEL=MODULE:CLASS",
        help="a further wrapper to run beside the others; may be repeated",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="run torch with views a second time: how far its ratio is from 1 is the noise",
    )
    parser.add_argument(
        "--system-malloc",
        action="store_true",
        help="leave glibc's malloc as it is, for every wrapper; page faults then come by luck",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="each variant in processes of its own, which take turns: what a script sees, with "
        "page faults, and with what Paceline tells malloc (paceline.freed_memory)",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a ratio to torch is above its target"
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    console = command.console()
    variants = (*STANDARD, *args.also, *([CONTROL] if args.control else []))
    results = [
        _measure(args, workload, ranks, variants)
        for workload in args.models
        for ranks in args.ranks
    ]
    console.print(_table(results))
    command.write_json(args.json, {"results": [result.to_json() for result in results]})
    missed = [result for result in results if not result.is_met]
    return 1 if args.check and missed else 0


def _measure(
    args: argparse.Namespace, workload: str, ranks: int, variants: tuple[Variant, ...]
) -> Result:
    schedule = Schedule(
        workload,
        variants,
        args.rounds,
        args.steps or WORKLOADS[workload].steps,
        is_malloc_steady=not (args.system_malloc or args.apart),
    )
    launch = _launch_apart if args.apart else _launch
    launches = []
    for seed in range(args.launches):
        bar = RoundBar(f"{workload}, {ranks} ranks, launch {seed + 1}", args.rounds)
        launches.append(launch(ranks, replace(schedule, seed=seed), bar, args.timeout))
    return Result(workload, ranks, join_launches(launches))


def _launch(ranks: int, schedule: Schedule, bar: RoundBar, timeout_s: float) -> Samples:
    return mean_over_ranks(run_ranks(ranks, run_rank, schedule, bar, timeout_s=timeout_s))


def _launch_apart(ranks: int, schedule: Schedule, bar: RoundBar, timeout_s: float) -> Samples:
    processes = ranks * len(schedule.variants)
    per_rank = run_ranks(processes, run_company_rank, schedule, bar, ranks, timeout_s=timeout_s)
    return join_companies(per_rank, ranks)


def _table(results: Sequence[Result]) -> Table:
    title = "forward + backward; ratios: median of rounds [95 % interval]; * torch's better mode"
    table = Table(title=escape(title))
    table.add_column("model, ranks", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for heading in (
        "p50 ms",
        "CPU ms",
        "/ torch's better mode",
        "CPU / torch",
        "/ local",
        "target",
    ):
        table.add_column(heading, justify="right", no_wrap=heading.startswith("/ torch"))
    for result in results:
        for label in result.samples:
            table.add_row(*_row(result, label))
        table.add_section()
    return table


def _row(result: Result, label: str) -> tuple[str, ...]:
    is_first = label == next(iter(result.samples))
    is_reference = label in (LOCAL, result.better)
    blocks = result.samples[label]
    return (
        f"{result.workload}, {result.ranks}" if is_first else "",
        f"{label} *" if label == result.better else label,
        f"{p50(walls(blocks)):.1f}",
        f"{p50(cpus(blocks)):.1f}",
        "" if is_reference else escape(str(result.against_torch(label))),
        "" if is_reference else f"{result.cpu_against_torch(label).value:.3f}",
        "" if label == LOCAL else f"{result.against_local(label).value:.2f}",
        _judgement(result) if label == PACELINE else "",
    )


def _judgement(result: Result) -> str:
    measured = result.against_torch(PACELINE)
    unsure = measured.low <= result.limit < measured.high
    word = "[green]met[/green]" if result.is_met else "[red]missed[/red]"
    return f"<= {result.limit:.2f} {word}{' (unsure)' if unsure else ''}"


if __name__ == "__main__":
    sys.exit(main())
